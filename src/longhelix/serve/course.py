"""How one request goes."""

from dataclasses import dataclass
from typing import Protocol

from longhelix.engine.result import Delta, Result


@dataclass
class Course:
    """Times are those of the event loop, by the monotonic clock. came_s: its call came; begun_s: its first step
    began; first_s, last_s: its first token came, and its latest; ended_s: it ended.

    reason: why it ended, empty while it has not: that of its result, "abort" where the client or the server left it,
    "error" where the engine failed.
    """

    prompt_tokens: int
    most_new_tokens: int
    came_s: float
    begun_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    new_tokens: int = 0
    result: Result | None = None
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.came_s

    @property
    def has_ended(self) -> bool:
        return self.reason != ""

    def began(self, at_s: float) -> None:
        """Its first step began then, unless an earlier one did: what was preempted begins again."""
        if self.begun_s is None:
            self.begun_s = at_s

    def come(self, delta: Delta, now_s: float) -> None:
        """It got something."""
        if delta.token_id is not None:
            self.new_tokens += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        if delta.result is not None:
            self.result = delta.result
            self.end(delta.result.finish_reason, now_s)

    def end(self, reason: str, now_s: float) -> None:
        self.reason, self.ended_s = reason, now_s


class RequestObserver(Protocol):
    """Who is told how requests go, on the event loop."""

    def asked(self, course: Course) -> None:
        """A request goes to the engine."""

    def taken(self, course: Course) -> None:
        """The engine has taken it, and all others of its call."""

    def came(self, course: Course, delta: Delta) -> None:
        """It got something."""

    def ended(self, course: Course, reason: str) -> None:
        """It ended without a result."""


class NoWatch:
    """Nobody."""

    def asked(self, course: Course) -> None: ...

    def taken(self, course: Course) -> None: ...

    def came(self, course: Course, delta: Delta) -> None: ...

    def ended(self, course: Course, reason: str) -> None: ...
