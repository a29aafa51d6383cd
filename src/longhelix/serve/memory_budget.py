"""Limit on the memory that the long answers of all calls may use together."""

from collections.abc import Callable

from longhelix.serve.refusals import OverloadedError


class MemoryBudget:
    """Memory limit that callers share.

    Args:
        most_bytes: maximum number of bytes over all callers. A caller may exceed it if no other bytes are reserved.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Reserve bytes.

        Returns:
            The function that releases them. Call it once.

        Raises:
            OverloadedError: other callers leave too few bytes.
        """
        if self.held_bytes and self.held_bytes + num_bytes > self._most_bytes:
            raise OverloadedError("too many long answers are in progress: try again later")
        self.held_bytes += num_bytes

        def release() -> None:
            self.held_bytes -= num_bytes

        return release
