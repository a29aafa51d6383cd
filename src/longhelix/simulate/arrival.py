"""Requests of a workload, with their arrival times, their lengths, and the prefixes that their prompts share."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from longhelix.scheduler.request import ANY_SERVICE, Request, SamplingParams, ServiceLevel


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request of a workload.

    A prompt starts with pieces. Pieces with the same id have the same tokens, so prompts can share them. The tokens
    after the pieces are unique to each prompt.

    A session has at most one unfinished request. Each request is sent `think_s` after the end of the session's previous
    request, but not before `arrival_s`.
    """

    arrival_s: float  # seconds since the start of the clock
    prompt_tokens: int
    output_tokens: int
    service: ServiceLevel = ANY_SERVICE
    pieces: tuple[int, ...] = ()  # ids of the pieces at the start of the prompt, from 0 to 2^31 - 1 (32-bit token ids)
    piece_tokens: int = 1  # tokens per piece
    session: str = ""  # empty if the request belongs to no session
    think_s: float = 0.0  # seconds between the end of the session's previous request and this one

    def request(self, id: int) -> Request:
        """Return the request for the scheduler. The answer always has `output_tokens` tokens."""
        prompt = Prompt(self, 2 * id + 1)
        sampling = SamplingParams(max_new_tokens=self.output_tokens, ignore_eos=True)
        return Request(
            id=id,
            prompt_token_ids=prompt,
            sampling=sampling,
            stop_token_ids=frozenset(),
            seed=0,
            arrival_s=self.arrival_s,
            service=self.service,
        )

    def scaled(self, factor: float) -> "Arrival":
        """Return the same request in a workload whose arrival rate is multiplied by `factor`."""
        return msgspec.structs.replace(self, arrival_s=self.arrival_s / factor, think_s=self.think_s / factor)


class Workload(Protocol):
    """Requests in the order of their arrival. It is possible to iterate over a workload more than once."""

    def __iter__(self) -> Iterator[Arrival]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ScaledWorkload:
    """A workload with its arrival rate multiplied by `factor`."""

    workload: Workload
    factor: float

    def __iter__(self) -> Iterator[Arrival]:
        return (arrival.scaled(self.factor) for arrival in self.workload)

    def __len__(self) -> int:
        return len(self.workload)


@dataclass(frozen=True)
class Prompt:
    """The token ids of an arrival's prompt, generated on demand.

    All tokens of a piece have the same negative id. Answer tokens have the id 0.
    """

    arrival: Arrival
    own_id: int  # id of all tokens after the pieces; positive and unique to this prompt
    generated: "array[int]" = field(default_factory=lambda: array("i"))  # answer tokens before a preemption

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
    """Return the requests per second from the first arrival to the last; 0 if all requests arrive at once."""
    times = [arrival.arrival_s for arrival in arrivals]
    span_s = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span_s if span_s else 0.0
