"""The process from which ranks are forked. Its command is `python -m longhelix.engine.workers.forking`.

It imports the modules that ranks need, such as torch, once for all ranks. It runs no operator, uses no device, and
starts no threads except those of numpy's BLAS, which can be forked. A forked process therefore starts in a clean state.
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
_DESCRIPTORS = 5  # number of file descriptors that come with a request


class ForkedProcess(NamedTuple):
    """A forked process and the pipe for its exit status."""

    pid: int
    report: int  # file descriptor of the pipe's writing end


def main() -> NoReturn:
    """Import the modules of ranks, then fork a process for each request.

    The command line contains the file descriptor of the socket for requests, and the id of the process that sends the
    requests. A forked process exits with the status that its module's `main` returns. After an exception, it exits in
    the same way as Python.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that started this process may have blocked signals
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    requests, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    try:
        importlib.import_module("longhelix.engine.workers.worker")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _flush()
        os._exit(1)  # a normal exit would wait for threads that the import may have started
    _flush()  # otherwise each rank would print the output of the imports
    gc.collect()
    gc.freeze()  # otherwise garbage collection would copy the memory that ranks share, page by page
    requested = _serve(requests, parent)
    status = 0
    if requested is not None:
        module, *arguments = requested
        sys.argv = [module, *arguments]
        status = importlib.import_module(module).main()
        atexit._run_exitfuncs()
    _flush()
    os._exit(status)  # a normal exit frees memory object by object, which takes a third of a second


def _serve(requests: socket.socket, parent: int) -> list[str] | None:
    """Answer request 0 to report that the imports are done. Then fork a process for each request.

    A request consists of a number, the module with the `main` to run, and its arguments. It comes with the file
    descriptors of the three standard streams, the working directory, and the writing end of a pipe for the exit status.
    The forked process also has the writing end open, so the reading end closes when both processes have ended. A
    request without a module kills the process that was forked for the same number, if there is one.

    Returns:
        In a forked process, the module and its arguments. In this process, None when no more requests can arrive.
    """
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(woken, select.POLLIN)
    forked: dict[int, ForkedProcess] = {}  # by the number of the request
    if not _answer(requests, {"number": 0}):
        return None
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(_POLL_MS)]
        if os.getppid() != parent:  # another process may still hold the other end of the socket
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
                raise OSError(
                    "the process that ranks are forked from has too many open files: increase the limit (ulimit -n)"
                )
            pid = _fork()
        except OSError as error:
            answer = {"number": number, "error": str(error)}
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                reports = [other.report for other in forked.values()]
                for descriptor in (*reports, requests.detach(), woken.detach(), wakes.detach()):
                    os.close(descriptor)
                _become(descriptors)
                return command
            os.setpgid(pid, pid)  # also set here, because the group must exist before the process id is sent
            forked[number] = ForkedProcess(pid, descriptors.pop())
            answer = {"number": number, "process_id": pid}
        for descriptor in descriptors:
            os.close(descriptor)
        if not _answer(requests, answer):
            return None


def _request(requests: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next request and its file descriptors. The request is empty if no more requests can arrive."""
    with suppress(ConnectionError):  # the other process ended without reading an answer
        message, descriptors, _, _ = socket.recv_fds(
            requests, LONGEST_REQUEST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        return message, descriptors
    return b"", []


def _answer(requests: socket.socket, answer: dict[str, int | str]) -> bool:
    """Send an answer. Returns whether the other process still receives answers."""
    with suppress(ConnectionError):
        requests.send(json.dumps(answer).encode())
        return True
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it warns about threads, but only numpy's BLAS has threads
        return os.fork()


def _become(descriptors: list[int]) -> None:
    """Switch to the streams and the working directory of a request, in a new process group."""
    *streams, directory, _ = descriptors
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.fchdir(directory)
    os.close(directory)
    sys.stdout.reconfigure(line_buffering=True)


def _report_ended(forked: dict[int, ForkedProcess]) -> None:
    """Write the exit status of each process that has ended to its pipe, and forget the process."""
    for number, process in list(forked.items()):
        ended, status = os.waitpid(process.pid, os.WNOHANG)
        if ended:
            with suppress(BrokenPipeError):  # no process reads the status
                os.write(process.report, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(process.report)
            del forked[number]


def _flush() -> None:
    """Flush the streams of Python and C. Output to a closed pipe is dropped without an error."""
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
