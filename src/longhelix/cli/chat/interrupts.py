"""What Ctrl-C does."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let an interrupt call `handler`, and what it called before once this is left."""
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
