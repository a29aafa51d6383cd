"""Times and token counts of one request, and the interface for observing requests."""

from dataclasses import dataclass
from typing import Protocol

from longhelix.engine.result import Delta, Result


@dataclass
class RequestProgress:
    """Times and token counts of one request. The event loop records the times, on the monotonic clock."""

    prompt_tokens: int
    max_new_tokens: int
    arrival_s: float  # when the HTTP request arrived
    first_step_s: float | None = None  # when the request's first step began
    first_token_s: float | None = None
    last_token_s: float | None = None  # when the latest token arrived
    ended_s: float | None = None
    new_tokens: int = 0
    result: Result | None = None
    # Why the request ended; empty until it ends. The value is the finish reason of the result, "abort" if the client
    # disconnected or the server is shutting down, or "error" if the engine failed.
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        return self.reason != ""

    def on_step(self, at_s: float) -> None:
        """Record the start of a step that runs this request. Only the first step counts, even after a preemption."""
        if self.first_step_s is None:
            self.first_step_s = at_s

    def on_delta(self, delta: Delta, now_s: float) -> None:
        """Record a new token or the result."""
        if delta.token_id is not None:
            self.new_tokens += 1
            self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
            self.last_token_s = now_s
        if delta.result is not None:
            self.result = delta.result
            self.end(delta.result.finish_reason, now_s)

    def end(self, reason: str, now_s: float) -> None:
        self.reason, self.ended_s = reason, now_s


class RequestObserver(Protocol):
    """Callbacks for events of requests. They run on the event loop."""

    def on_queued(self, progress: RequestProgress) -> None:
        """The request is queued for the engine."""

    def on_accepted(self, progress: RequestProgress) -> None:
        """The engine has accepted this request and all other requests of the same HTTP request."""

    def on_delta(self, progress: RequestProgress, delta: Delta) -> None:
        """The request has a new token or its result."""

    def on_ended(self, progress: RequestProgress, reason: str) -> None:
        """The request has ended without a result."""


class NullObserver:
    """Observer that ignores every event."""

    def on_queued(self, progress: RequestProgress) -> None: ...

    def on_accepted(self, progress: RequestProgress) -> None: ...

    def on_delta(self, progress: RequestProgress, delta: Delta) -> None: ...

    def on_ended(self, progress: RequestProgress, reason: str) -> None: ...
