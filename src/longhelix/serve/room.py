"""How much memory the long answers of all calls may take together."""

from collections.abc import Callable

from longhelix.serve.refusals import OverloadedError


class Room:
    """Bytes that callers share.

    Args:
        most_bytes: of all callers together. One caller alone may have more.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> Callable[[], None]:
        """Take a part. Returns what gives it back, which is called once. Raises OverloadedError if others leave too
        little."""
        if self.held_bytes and self.held_bytes + num_bytes > self._most_bytes:
            raise OverloadedError("too many long answers are in progress: try again later")
        self.held_bytes += num_bytes

        def give_back() -> None:
            self.held_bytes -= num_bytes

        return give_back
