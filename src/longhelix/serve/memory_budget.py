"""Limit on the memory that the long answers of all calls take together."""

from collections.abc import Callable

from longhelix.serve.refusals import OverloadedError


class MemoryBudget:
    """Number of bytes that callers share.

    Args:
        most_bytes: most bytes of all callers together. A single caller may exceed it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Reserve bytes.

        Returns:
            The function that releases them. Call it once.

        Raises:
            OverloadedError: other callers leave too few.
        """
        if self.held_bytes and self.held_bytes + num_bytes > self._most_bytes:
            raise OverloadedError("too many long answers are in progress: try again later")
        self.held_bytes += num_bytes

        def release() -> None:
            self.held_bytes -= num_bytes

        return release
