"""Microbatches: one set of decoding sequences per pipeline stage."""

from collections.abc import Collection, Set

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.load import Load
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Turn
from longhelix.scheduler.work import Cost

# The most steps of one microbatch in flight, if there are several microbatches. With two, the next step is on its way
# to the first stage when one leaves the last stage. More would only delay requests that arrive meanwhile.
_MOST_IN_FLIGHT = 2


class Microbatches:
    """The decoding sequences in one `Decodes` per pipeline stage. Implements `Turns`.

    A step has the rows of one microbatch. So all stages have work while a sequence's next row waits for its last token.

    When its prompt is done, a sequence joins the microbatch whose rows take the shortest time by `cost`, or without a
    cost the smallest one. An empty microbatch gets a sequence of another one.
    """

    def __init__(self, pp: int, kvp: int, block_tokens: int, cost: Cost | None = None) -> None:
        self._cost = cost
        self._kvp = kvp
        self._microbatches = [Decodes(block_tokens, kvp) for _ in range(pp)]
        self._joining: list[list[Sequence]] = [[] for _ in range(pp)]
        self._in_flight = [0] * pp
        self._last_step = [0] * pp
        self._last = self._current = -1  # microbatches of the last step and of the current one

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._microbatches[seq.schedule.microbatch]

    def decoding(self, turn: Turn) -> tuple[Decodes]:
        return (self._microbatches[turn.microbatch],)

    def load(self, turn: Turn) -> Load:
        load = Load(self._kvp)
        load.add_decodes(self._microbatches[turn.microbatch])
        return load

    def tbt_slo_s(self, turn: Turn) -> float:
        """See `Turns`. Every sequence waits for the steps of all microbatches."""
        return min(decodes.tbt_slo_s for decodes in self._microbatches)

    def may_begin(self, busy: Set[int]) -> bool:
        return len(self._microbatches) == 1 or min(self._in_flight) < _MOST_IN_FLIGHT

    def begin(self, seq: Sequence) -> None:
        """See `Turns`. The sequence has no microbatch yet."""

    def prompt_done(self, seq: Sequence, step_id: int) -> None:
        self._let_join(seq, min(range(len(self._microbatches)), key=self._load), step_id)

    def deal(self) -> list[Sequence]:
        """Move the longest sequence of the fullest microbatch to each empty one, and return the moved sequences."""
        moved: list[Sequence] = []
        if len(self._microbatches) == 1 or max(map(len, self._microbatches)) < 2:
            return moved
        for empty, joining in enumerate(self._joining):
            if not joining and not len(self._microbatches[empty]):
                fullest = max(range(len(self._microbatches)), key=self._load)
                seq = self._microbatches[fullest].longest() if len(self._microbatches[fullest]) > 1 else None
                if seq is not None:
                    self._microbatches[fullest].leave(seq)
                    self._let_join(seq, empty, self._last_step[fullest])
                    moved.append(seq)
        return moved

    def _let_join(self, seq: Sequence, microbatch: int, after: int) -> None:
        seq.schedule.microbatch, seq.schedule.joins_after = microbatch, after
        self._joining[microbatch].append(seq)

    def _load(self, microbatch: int) -> tuple[float, int]:
        """Return the seconds and the number of a microbatch's rows."""
        decodes, joining = self._microbatches[microbatch], self._joining[microbatch]
        rows = len(decodes) + len(joining)
        if self._cost is None or not rows:
            return 0.0, rows
        load = Load(self._kvp)
        load.add_decodes(decodes)
        for seq in joining:
            load.add_decode(seq)
        return load.seconds(self._cost), rows

    def in_turn(self, step_id: int, oldest_id: int, busy: Set[int], prompts: Collection[Sequence]) -> list[Turn]:
        """See `Turns`. Microbatches with rows come first, unless there are prompts, whose chunks any turn can have."""
        pp = len(self._microbatches)
        if pp == 1:
            return [Turn()]
        turns = ((self._last + 1 + turn) % pp for turn in range(pp))
        free = [microbatch for microbatch in turns if self._in_flight[microbatch] < _MOST_IN_FLIGHT]
        if not prompts:
            free.sort(key=lambda microbatch: not self._has_rows(microbatch, step_id, oldest_id))
        return [Turn(microbatch) for microbatch in free]

    def _has_rows(self, microbatch: int, step_id: int, oldest_id: int) -> bool:
        return len(self._microbatches[microbatch]) > 0 or bool(self._ready(microbatch, step_id, oldest_id))

    def _ready(self, microbatch: int, step_id: int, oldest_id: int) -> list[Sequence]:
        """Return the sequences that can join a microbatch now.

        Their last token is known, or will be when the step needs it: no stage waits longer than for a whole round.
        """
        pp = len(self._microbatches)
        return [
            seq
            for seq in self._joining[microbatch]
            if step_id >= seq.schedule.joins_after + pp or seq.schedule.joins_after < oldest_id
        ]

    def join(self, turn: Turn, step_id: int, oldest_id: int) -> list[Sequence]:
        microbatch = self._current = turn.microbatch
        if not self._joining[microbatch]:
            return []
        joined = self._ready(microbatch, step_id, oldest_id)
        self._joining[microbatch] = [seq for seq in self._joining[microbatch] if seq not in joined]
        for seq in joined:
            self._microbatches[microbatch].join(seq)
        return joined

    def may_lose(self, seq: Sequence) -> bool:
        decodes = self._microbatches[seq.schedule.microbatch]
        return seq in decodes and (seq.schedule.microbatch == self._current or decodes.has_more_rows(seq))

    def grew(self, seq: Sequence) -> None:
        self._microbatches[seq.schedule.microbatch].grew(seq)

    def recount(self) -> None:
        for decodes in self._microbatches:
            decodes.recount()

    def leave(self, seq: Sequence) -> None:
        if seq in self:
            self._microbatches[seq.schedule.microbatch].leave(seq)
        elif seq in (joining := self._joining[seq.schedule.microbatch]):
            joining.remove(seq)

    def began(self, turn: Turn, step_id: int) -> None:
        self._last = turn.microbatch
        self._last_step[turn.microbatch] = step_id
        self._in_flight[turn.microbatch] += 1

    def ended(self, turn: Turn) -> None:
        self._in_flight[turn.microbatch] -= 1
