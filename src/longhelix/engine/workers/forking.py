"""The process that ranks are forked from, `python -m longhelix.engine.workers.forking`.

It has imported, once for all of them, what ranks need, torch above all, and does nothing with it.

It runs no operator, touches no device and starts no thread, but for those of numpy's BLAS, which know how to be forked:
what is forked from it begins like a process of its own.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import NamedTuple, NoReturn

from longhelix.engine.workers.fork_server import LONGEST_REQUEST_BYTES

_POLL_MS = 500
_DESCRIPTORS = 5  # that come with a request


class Forked(NamedTuple):
    """A process, and the pipe for its status."""

    pid: int
    report: int


def main() -> NoReturn:
    """Its arguments are the socket of requests, and the process that asks. Each process that is forked ends with the
    status that the `main` of its module returns, or as Python ends with an error."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whatever the thread blocked that started this
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    requests, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    try:
        importlib.import_module("longhelix.engine.workers.worker")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _flush()
        os._exit(1)  # whatever threads it has begun, which Python would wait for
    _flush()  # what was printed while importing is no rank's
    gc.collect()
    gc.freeze()  # the collector would otherwise copy, page by page, what ranks share
    requested = _serve(requests, parent)
    status = 0
    if requested is not None:
        module, *arguments = requested
        sys.argv = [module, *arguments]
        status = importlib.import_module(module).main()
        atexit._run_exitfuncs()
    _flush()
    os._exit(status)  # the system frees at once what Python would take apart object by object, for a third of a second


def _serve(requests: socket.socket, parent: int) -> list[str] | None:
    """Say that all is imported, as the answer to request 0. Then fork a process for each request: a number, the module
    whose `main` it runs, and arguments. Returns the module and them there; here, None once nobody can ask any more.

    A request brings the standard streams, the directory to stand in, and the end of a pipe that takes the status once
    the process has ended. The process holds that end, too: the other end closes when both are gone. A request without
    a module ends the process of its number, if there is one.
    """
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(woken, select.POLLIN)
    forked: dict[int, Forked] = {}  # by request
    if not _answer(requests, {"number": 0}):
        return None
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(_POLL_MS)]
        if os.getppid() != parent:  # perhaps with another process that holds its end of the socket
            return None
        if woken.fileno() in ready:
            woken.recv(LONGEST_REQUEST_BYTES)
        _report_ended(forked)
        if requests.fileno() not in ready:
            continue
        message, descriptors = _request(requests)
        if not message:
            return None
        number, command = json.loads(message)
        if not command:
            if number in forked:
                os.killpg(forked[number].pid, signal.SIGKILL)
            continue
        try:
            if len(descriptors) != _DESCRIPTORS:
                raise OSError("the process that ranks are forked from has too many open files")
            pid = _fork()
        except OSError as error:
            answer = {"number": number, "error": str(error)}
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                of_others = [other.report for other in forked.values()]
                for descriptor in (*of_others, requests.detach(), woken.detach(), wakes.detach()):
                    os.close(descriptor)
                _become(descriptors)
                return command
            os.setpgid(pid, pid)  # here as well: whoever is told its id may signal its group
            forked[number] = Forked(pid, descriptors.pop())
            answer = {"number": number, "process_id": pid}
        for descriptor in descriptors:
            os.close(descriptor)
        if not _answer(requests, answer):
            return None


def _request(requests: socket.socket) -> tuple[bytes, list[int]]:
    """The next one and its descriptors; an empty one once nobody can ask any more."""
    with suppress(ConnectionError):  # who asked ended with an answer unread
        message, descriptors, _, _ = socket.recv_fds(
            requests, LONGEST_REQUEST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        return message, descriptors
    return b"", []


def _answer(requests: socket.socket, answer: dict[str, int | str]) -> bool:
    """Whether somebody hears it."""
    with suppress(ConnectionError):
        requests.send(json.dumps(answer).encode())
        return True
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: they are those of numpy's BLAS
        return os.fork()


def _become(descriptors: list[int]) -> None:
    """Take the streams and the directory that came with a request, in a process group of one's own."""
    *streams, directory, _ = descriptors
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.fchdir(directory)
    os.close(directory)
    sys.stdout.reconfigure(line_buffering=True)


def _report_ended(forked: dict[int, Forked]) -> None:
    for number, process in list(forked.items()):
        ended, status = os.waitpid(process.pid, os.WNOHANG)
        if ended:
            with suppress(BrokenPipeError):  # nobody wants to know
                os.write(process.report, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(process.report)
            del forked[number]


def _flush() -> None:
    """Python's streams, and those of C. What nobody reads any more is dropped, and is no error."""
    for stream in sys.stdout, sys.stderr:
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            stream.flush()
    ctypes.CDLL(None).fflush(None)


if __name__ == "__main__":
    main()
