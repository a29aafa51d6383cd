"""Draft tokens: guesses of a request's next tokens. One step verifies several of them."""

import math
from array import array
from typing import Protocol

from longhelix.scheduler.instances import tokens_within
from longhelix.scheduler.request import Request
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Step, Turn


class Drafter(Protocol):
    """Guesses the next tokens of requests."""

    def drafts(self, request: Request) -> bool:
        """Return whether it guesses for a request. It is asked each time the request has computed its prompt."""
        ...

    def propose(self, seq: Sequence) -> "array[int]":
        """Return draft tokens, as int32: the tokens that may come next. May be empty. The scheduler waits for it."""
        ...


class Drafting:
    """The decoding sequences with draft tokens.

    Their next rows depend on how many tokens were accepted. So each sequence has at most one step in flight, and is
    ready for the next one when the result is known. Other sequences do not wait.

    Args:
        drafter: Guesses the tokens. None: no sequence has draft tokens.
        pp: The number of pipeline stages. A step takes only its share of the sequences, so that all stages have work.
    """

    def __init__(self, drafter: Drafter | None, pp: int) -> None:
        self._drafter, self._pp = drafter, pp
        # By id, in the order in which they came to be in flight or ready.
        self._in_flight: dict[int, Sequence] = {}
        self._ready: dict[int, Sequence] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._ready or seq.id in self._in_flight

    def tbt_slo_s(self, turn: Turn) -> float:
        """Return the shortest time between tokens that the turn's sequences ask for."""
        sequences = (*self._ready.values(), *self._in_flight.values())
        targets = (seq.request.service.tbt_slo_s for seq in sequences if turn.has(seq.schedule.instances))
        return min((target_s for target_s in targets if target_s is not None), default=math.inf)

    def handles(self, seq: Sequence) -> bool:
        """Return whether a sequence has draft tokens from the end of its prompt on."""
        return self._drafter is not None and self._drafter.drafts(seq.request)

    def prompt_done(self, seq: Sequence) -> None:
        """Add a sequence whose first token the step in preparation samples."""
        self._in_flight[seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence that no longer runs, if it is one of these."""
        self._in_flight.pop(seq.id, None)
        self._ready.pop(seq.id, None)

    def ready(self, turn: Turn) -> list[Sequence]:
        """Return the sequences that the turn's step takes."""
        if not self._ready:
            return []
        most = -(-(len(self._ready) + len(self._in_flight)) // self._pp)
        return [seq for seq in self._ready.values() if turn.has(seq.schedule.instances)][:most]

    def token_ids(self, seq: Sequence) -> "array[int]":
        """Return a sequence's last token and its draft tokens, for as many rows as it can have."""
        assert self._drafter is not None, "it takes the sequence"
        token_ids = seq.tokens.output[-1:] + self._drafter.propose(seq)
        return token_ids[: tokens_within(seq, min(len(token_ids), seq.schedule.num_rows - seq.length))]

    def submit(self, seq: Sequence) -> None:
        """Note that the step in preparation has a draft of a sequence."""
        self._in_flight[seq.id] = self._ready.pop(seq.id)

    def take_result(self, step: Step) -> list[Sequence]:
        """Learn how many draft tokens of a step were accepted. Returns the sequences that are ready for a next step."""
        ready = list[Sequence]()
        if not self._in_flight:
            return ready
        prompts = (chunk.id for chunk in step.chunks if chunk.sample)
        for id in (*prompts, *(draft.id for draft in step.drafts)):
            seq = self._in_flight.pop(id, None)
            if seq is not None:
                seq.length = seq.known_length
                self._ready[id] = seq
                ready.append(seq)
        return ready
