"""Microbatches: the sequences that decode, dealt to as many sets as there are pipeline stages."""

import math

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.sequence import Sequence

# Of steps of one microbatch, where there are others: its next one is on its way to the first stage when the last one
# leaves the last stage, and requests that come meanwhile wait for no more.
_MOST_IN_FLIGHT = 2


class Microbatches:
    """One `Decodes` for each of `pp` stages. A step has the rows of one of them, so that all stages have work while a
    sequence's next row waits for its last token.

    A sequence joins the microbatch that had the fewest sequences when its prompt was done.
    """

    def __init__(self, pp: int, block_tokens: int) -> None:
        self._each = [Decodes(block_tokens) for _ in range(pp)]
        self._joining: list[list[Sequence]] = [[] for _ in range(pp)]
        self._in_flight = [0] * pp
        self._most_in_flight = _MOST_IN_FLIGHT if pp > 1 else math.inf
        self._last = -1

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._each[seq.microbatch]

    def __getitem__(self, microbatch: int) -> Decodes:
        return self._each[microbatch]

    @property
    def tbt_slo_s(self) -> float:
        """The least time between tokens that any sequence asks for: each waits for the steps of all microbatches."""
        return min(decodes.tbt_slo_s for decodes in self._each)

    @property
    def may_begin(self) -> bool:
        """Whether there may be another step in flight."""
        return min(self._in_flight) < self._most_in_flight

    def prompt_done(self, seq: Sequence, step_id: int) -> None:
        """A sequence's last chunk is in this step; it decodes as soon as it can."""
        sizes = [len(decodes) + len(joining) for decodes, joining in zip(self._each, self._joining, strict=True)]
        seq.microbatch, seq.prompt_done_in = sizes.index(min(sizes)), step_id
        self._joining[seq.microbatch].append(seq)

    def in_turn(self, step_id: int, oldest_id: int, any_first: bool) -> list[int]:
        """The microbatches of which one may be that of the step with this id, where `oldest_id` is that of the oldest
        step in flight. Those that have rows come before the others, unless any may be first."""
        pp = len(self._each)
        turns = ((self._last + 1 + turn) % pp for turn in range(pp))
        found = [microbatch for microbatch in turns if self._in_flight[microbatch] < self._most_in_flight]
        if len(found) > 1 and not any_first:
            found.sort(key=lambda microbatch: not self._has_rows(microbatch, step_id, oldest_id))
        return found

    def _has_rows(self, microbatch: int, step_id: int, oldest_id: int) -> bool:
        return len(self._each[microbatch]) > 0 or bool(self._ready(microbatch, step_id, oldest_id))

    def _ready(self, microbatch: int, step_id: int, oldest_id: int) -> list[Sequence]:
        """Those that can join a microbatch, whose first token is known, or is by the time that the step needs it: no
        stage waits for it longer than for those of a whole round."""
        pp = len(self._each)
        return [
            seq
            for seq in self._joining[microbatch]
            if step_id >= seq.prompt_done_in + pp or seq.prompt_done_in < oldest_id
        ]

    def join(self, microbatch: int, step_id: int, oldest_id: int) -> list[Sequence]:
        """Let sequences decode, of one microbatch whose next step is made."""
        if not self._joining[microbatch]:
            return []
        joined = self._ready(microbatch, step_id, oldest_id)
        self._joining[microbatch] = [seq for seq in self._joining[microbatch] if seq not in joined]
        for seq in joined:
            self._each[microbatch].join(seq)
        return joined

    def leave(self, seq: Sequence) -> None:
        """A sequence ends, whether it decodes or was about to."""
        if seq in self:
            self._each[seq.microbatch].leave(seq)
        elif seq in (joining := self._joining[seq.microbatch]):
            joining.remove(seq)

    def began(self, microbatch: int) -> None:
        """A step of it is in flight."""
        self._last = microbatch
        self._in_flight[microbatch] += 1

    def ended(self, microbatch: int) -> None:
        """The oldest step of it is no longer in flight."""
        self._in_flight[microbatch] -= 1
