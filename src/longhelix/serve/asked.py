"""A request for the engine, and its way there."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from longhelix.engine.contexts import ReadContext
from longhelix.engine.prompt import Prompt
from longhelix.engine.result import Delta
from longhelix.scheduler.guide import ReasoningTags
from longhelix.scheduler.request import SamplingParams, ServiceLevel
from longhelix.serve.course import Course

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PrefillProgress:
    """How many tokens of a prompt the ranks have been given."""

    prefilled_tokens: int


@dataclass(frozen=True)
class Quiet:
    """Nothing has come for a while."""


@dataclass(frozen=True)
class Asked:
    """A request for the engine. num_tokens: of the prompt, and of the saved context before it. came_s: when its call
    came, by the monotonic clock. watched: its progress is told before its first token. reasoning: tags whose text is
    kept apart."""

    prompt: Prompt
    num_tokens: int
    sampling: SamplingParams
    service: ServiceLevel
    came_s: float
    watched: bool = False
    context: str | ReadContext | None = None
    reasoning: ReasoningTags | None = None


class Answer:
    """One request on its way, which waits until it has its first token. taken: is done once the engine has taken it, or
    has the refusal."""

    def __init__(self, asked: Asked, give: Callable[["Got"], None]) -> None:
        self.asked, self.give = asked, give
        self.waits = True
        self.course = Course(asked.num_tokens, asked.sampling.max_new_tokens, asked.came_s)
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Of several refusals of one call the first is told: the others count as told, too.
        self.taken.add_done_callback(lambda taken: taken.cancelled() or taken.exception())
        self.aborted = False  # by the event loop; the engine thread looks
        # The engine thread's alone.
        self.request_id: int | None = None
        self.failures = 0  # of the engine while it was added

    @property
    def was_refused(self) -> bool:
        return self.taken.done() and not self.taken.cancelled() and self.taken.exception() is not None


Got = Delta | PrefillProgress | Exception


def settle(future: "asyncio.Future[_Value]", value: _Value) -> None:
    """Unless whoever waited for it has gone."""
    if not future.done():
        future.set_result(value)


def fail(future: "asyncio.Future[_Value]", error: Exception) -> None:
    """Likewise."""
    if not future.done():
        future.set_exception(error)
