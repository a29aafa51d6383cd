"""Requests for the engine and the updates that they receive."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from longhelix.engine.contexts import ReadContext
from longhelix.engine.prompt import Prompt
from longhelix.engine.result import Delta
from longhelix.scheduler.guide import ReasoningTags
from longhelix.scheduler.request import SamplingParams, ServiceLevel
from longhelix.serve.request_progress import RequestProgress

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PrefillProgress:
    """Number of prompt tokens that the ranks have received."""

    prefilled_tokens: int


@dataclass(frozen=True)
class IdleNotice:
    """Notice that no update has arrived for a while."""


@dataclass(frozen=True)
class EngineRequest:
    """Request for the engine: one choice for one prompt of an HTTP request."""

    prompt: Prompt
    num_tokens: int  # number of tokens in the prompt and in the saved context before it
    sampling: SamplingParams
    service: ServiceLevel
    arrival_s: float  # when the HTTP request arrived, on the monotonic clock
    wants_progress: bool = False  # True if the client receives `PrefillProgress` before the first token
    context: str | ReadContext | None = None  # saved context that the prompt continues
    reasoning: ReasoningTags | None = None  # tags around text that is returned separately from the content


class PendingRequest:
    """State of a request from the moment it is queued until it ends.

    Args:
        request: the request.
        on_update: called on the event loop with each update.
    """

    def __init__(self, request: EngineRequest, on_update: Callable[["RequestUpdate"], None]) -> None:
        self.request, self.on_update = request, on_update
        self.is_waiting = True  # True until the first token
        self.progress = RequestProgress(request.num_tokens, request.sampling.max_new_tokens, request.arrival_s)
        # Completes when the engine accepts the request. Fails with the reason if the engine refuses it.
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Only the first refusal of a call is reported. Without this callback, asyncio would log that nobody retrieved
        # the other exceptions.
        self.accepted.add_done_callback(lambda accepted: accepted.cancelled() or accepted.exception())
        self.aborted = False  # set by the event loop, read by the engine thread
        # Only the engine thread uses the following attributes.
        self.request_id: int | None = None
        self.failures = 0  # engine failures while the request was being added

    @property
    def was_refused(self) -> bool:
        return self.accepted.done() and not self.accepted.cancelled() and self.accepted.exception() is not None


RequestUpdate = Delta | PrefillProgress | Exception


def settle(future: "asyncio.Future[_Value]", value: _Value) -> None:
    """Set the result of a future, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(value)


def fail(future: "asyncio.Future[_Value]", error: Exception) -> None:
    """Set the error of a future, unless the future is done or cancelled."""
    if not future.done():
        future.set_exception(error)
