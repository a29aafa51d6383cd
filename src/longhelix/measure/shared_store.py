"""The store on host 0 through which hosts that measure together meet."""

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from longhelix.errors import EngineError, UserError

_CALL_S = 20.0  # longest time for a call, after which the connection to host 0 is lost

_Answer = queue.SimpleQueue[tuple[bool, Any]]


class SharedStore:
    """A torch store whose calls end. Those of torch's own block while host 0 is stopped or cut off.

    All methods raise EngineError if the connection to host 0 is lost.
    """

    def __init__(self, store: dist.Store) -> None:
        self._calls = queue.SimpleQueue[tuple[Callable[[], Any], _Answer]]()
        self._store, self._is_lost = store, False
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def host(cls, address: str, port: int) -> "SharedStore":
        """Open the store on host 0. Raises UserError: the port cannot be used."""
        try:
            opened = socket.create_server((address, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {address} cannot be used ({error.strerror}): set --master-port to another port",
                "invalid_cluster",
            ) from error
        descriptor = opened.detach()
        return cls(dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor))

    @classmethod
    def join(cls, address: str, port: int, limit_s: float) -> "SharedStore":
        """Connect to the store. Raises UserError: host 0 does not answer within a time limit."""
        try:
            return cls(client(address, port, limit_s))
        except RuntimeError as error:
            raise UserError(
                f"host 0 did not answer at {address}:{port} within {limit_s:.0f} s: start it, or correct --master-addr "
                "and --master-port",
                "invalid_cluster",
            ) from error

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> None:
        """Set a key unless it is set."""
        self._call(lambda: self._store.compare_set(key, "", value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return self._call(lambda: self._store.get(key))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are set."""
        return self._call(lambda: self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return it."""
        return self._call(lambda: self._store.add(key, number))

    def _call(self, call: Callable[[], Any]) -> Any:
        answer: _Answer = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            is_found, found = answer.get(timeout=0 if self._is_lost else _CALL_S)
        except queue.Empty:
            is_found, found = False, None
        if not is_found:
            self._is_lost = True
            raise EngineError("the connection to host 0 is lost: see what it has printed") from found
        return found

    def _run(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                answer.put((True, call()))
            except RuntimeError as error:
                answer.put((False, error))


def client(address: str, port: int, timeout_s: float) -> dist.Store:
    """Return torch's own client of the store, for ranks. Raises RuntimeError: host 0 does not answer in time."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
