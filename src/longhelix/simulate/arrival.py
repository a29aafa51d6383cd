"""Requests before they are requests: when they arrive, how long they are, and what their prompts share."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from longhelix.scheduler.request import ANY_SERVICE, Request, SamplingParams, ServiceLevel


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request that arrives `arrival_s` after the clock's zero.

    pieces: ids of the pieces of `piece_tokens` tokens that its prompt begins with: prompts are alike where these are.
    They count from 0, below 2^31: token ids have 32 bits. What follows the pieces no other prompt has. A session has
    one request at a time: each is sent `think_s` after the end of the one before, at `arrival_s` at the earliest.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    service: ServiceLevel = ANY_SERVICE
    pieces: tuple[int, ...] = ()
    piece_tokens: int = 1
    session: str = ""
    think_s: float = 0.0

    def request(self, id: int) -> Request:
        """What the scheduler gets of it. No token ends the answer before its length."""
        prompt = Prompt(self, 2 * id + 1)
        sampling = SamplingParams(max_new_tokens=self.output_tokens, ignore_eos=True)
        return Request(id, prompt, sampling, frozenset(), 0, self.arrival_s, self.service)

    def sooner(self, factor: float) -> "Arrival":
        """The same request where all arrive at `factor` times the rate."""
        return msgspec.structs.replace(self, arrival_s=self.arrival_s / factor, think_s=self.think_s / factor)


class Workload(Protocol):
    """Requests in the order in which they arrive; may be gone through again and again."""

    def __iter__(self) -> Iterator[Arrival]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Sooner:
    """A workload at `factor` times its rate."""

    workload: Workload
    factor: float

    def __iter__(self) -> Iterator[Arrival]:
        return (arrival.sooner(self.factor) for arrival in self.workload)

    def __len__(self) -> int:
        return len(self.workload)


@dataclass(frozen=True)
class Prompt:
    """The token ids of an arrival's prompt, made when they are asked for.

    All tokens of a piece have one id, which is negative. Those after the pieces have `own_id`, which is above 0 and no
    other prompt's. Tokens of answers are 0. generated: what a request goes on with after it was preempted.
    """

    arrival: Arrival
    own_id: int
    generated: "array[int]" = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return self.arrival.prompt_tokens + len(self.generated)

    def __add__(self, more: "array[int]", /) -> "Prompt":
        return replace(self, generated=self.generated + more)

    def __getitem__(self, part: slice, /) -> "array[int]":
        start, stop, _ = part.indices(len(self))
        given = self.arrival.prompt_tokens
        if stop <= given:
            return self._given(start, stop)
        return self._given(start, given) + self.generated[max(start - given, 0) : stop - given]

    def _given(self, start: int, stop: int) -> "array[int]":
        pieces, piece_tokens = self.arrival.pieces, self.arrival.piece_tokens
        token_ids = array("i")
        while start < min(stop, len(pieces) * piece_tokens):
            index = start // piece_tokens
            end = min((index + 1) * piece_tokens, stop)
            token_ids += array("i", [~pieces[index]]) * (end - start)
            start = end
        return token_ids + array("i", [self.own_id]) * (stop - start)


def rate_per_s(arrivals: Iterable[Arrival]) -> float:
    """Requests per second from the first to the last; 0 where all arrive at once."""
    times = [arrival.arrival_s for arrival in arrivals]
    span_s = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span_s if span_s else 0.0
