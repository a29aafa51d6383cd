"""What ranks have yet to hear beside a step's rows: which sequences begin and end, and what is copied for them."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import NewSequence
from longhelix.scheduler.turns import Turn

Copies = tuple[tuple[Block, Block], ...]


class Begun(NamedTuple):
    """A request that begins to run: as the scheduler follows it and as workers hear of it; and the copy of the block
    that its prefix does not fill."""

    seq: Sequence
    new: NewSequence
    copies: Copies


class Notices:
    """Each goes with the next step of those whom it concerns. Of a sequence that has ended, KVP instances with clocks
    of their own hear each with a step of its own."""

    def __init__(self) -> None:
        self._begun: dict[int, Begun] = {}
        self._enlisted: dict[int, Sequence] = {}
        self._ended: list[tuple[int, tuple[int, ...]]] = []  # and the instances that have yet to hear of it

    def begin(self, begun: Begun) -> None:
        """A sequence runs from now on."""
        self._begun[begun.seq.id] = begun

    def is_new(self, seq: Sequence) -> bool:
        """Whether no rank has heard of it yet."""
        return seq.id in self._begun

    def enlist(self, seq: Sequence) -> None:
        """An instance more takes part in a sequence."""
        if not self.is_new(seq):
            self._enlisted[seq.id] = seq

    @property
    def enlisted(self) -> Collection[Sequence]:
        """The sequences that an instance which takes part in them has yet to hear of."""
        return self._enlisted.values()

    def end(self, seq: Sequence) -> Copies:
        """A sequence runs no longer. Returns the copies for it that nobody has heard of."""
        self._enlisted.pop(seq.id, None)
        begun = self._begun.pop(seq.id, None)
        if begun is None:
            self._ended.append((seq.id, seq.instances))
        return () if begun is None else begun.copies

    def has_for(self, turn: Turn) -> bool:
        """Whether somebody hears with the turn's step that a sequence has ended."""
        return any(turn.has(instances) for _, instances in self._ended)

    @property
    def ending(self) -> set[int]:
        """Of which sequences somebody has yet to hear that they have ended."""
        return {id for id, _ in self._ended}

    @property
    def any_end(self) -> bool:
        return bool(self._ended)

    def begun_in(self, turn: Turn) -> tuple[tuple[NewSequence, ...], Copies]:
        """The sequences that begin with the turn's step, and what is copied for them."""
        begun = [one for one in self._begun.values() if turn.has(one.seq.instances)]
        for one in begun:
            del self._begun[one.seq.id]
        return tuple(_of_now(one) for one in begun), tuple(copy for one in begun for copy in one.copies)

    def enlisted_in(self, turn: Turn) -> tuple[NewSequence, ...]:
        """The sequences that an instance more takes part in from the turn's step on. Whatever that says of them comes
        after what they are to that instance: what is known here, since nothing of them is in flight that samples."""
        enlisted = [seq for seq in self._enlisted.values() if turn.has(seq.instances)]
        for seq in enlisted:
            del self._enlisted[seq.id]
        return tuple(map(_as_it_is, enlisted))

    def ended_in(self, turn: Turn) -> tuple[int, ...]:
        """The sequences that have ended, as those who take the turn's step hear."""
        told, left = [], []
        for id, instances in self._ended:
            others = tuple(one for one in instances if turn.instances and one not in turn.instances)
            if turn.has(instances):
                told.append(id)
            if others:
                left.append((id, others))
        self._ended = left
        return tuple(told)


def _of_now(begun: Begun) -> NewSequence:
    """As workers hear of it: more instances may take part in it by now than when it was admitted."""
    instances = begun.seq.instances
    return msgspec.structs.replace(begun.new, instances=instances) if instances else begun.new


def _as_it_is(seq: Sequence) -> NewSequence:
    """A sequence that runs, to an instance without KV of it: all its tokens are cached elsewhere."""
    request = seq.request
    return NewSequence(
        seq.id,
        request.sampling,
        request.seed,
        request.capacity_tokens,
        tuple(seq.room),
        seq.placement.spread,
        seq.known_length,
        (Block(seq.last_owner, 0),) * (1 + len(seq.windows)) if seq.num_blocks else (),
        instances=seq.instances,
        last_token=seq.output[-1] if seq.output else None,
        images=request.images,
    )
