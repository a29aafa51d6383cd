"""Changes to the set of running sequences that the ranks have not received yet."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import NO_TOKENS, InitialKV, KnownTokens, NewSequence, Turn

Copies = tuple[tuple[Block, Block], ...]


class StartedSequence(NamedTuple):
    """A request that was just admitted.

    Attributes:
        seq: The scheduler's record of it.
        new: What the ranks receive.
        copies: A copy of the cached block that its prefix fills only in part, if there is one.
    """

    seq: Sequence
    new: NewSequence
    copies: Copies


class PendingChanges:
    """Sequences that started, ended, or were joined by another KVP instance since the ranks received their last step.

    The next step of the ranks concerned carries each change. If KVP instances have their own clocks, the instances of
    a sequence receive its end in different steps.
    """

    def __init__(self) -> None:
        self._started: dict[int, StartedSequence] = {}
        self._joined: dict[int, Sequence] = {}
        # Each with the instances that have not received the end yet.
        self._ended: list[tuple[int, tuple[int, ...]]] = []

    def add_started(self, started: StartedSequence) -> None:
        """Add a sequence that starts with the next step."""
        self._started[started.seq.id] = started

    def is_new(self, seq: Sequence) -> bool:
        """Return whether no rank knows the sequence yet."""
        return seq.id in self._started

    def add_joined(self, seq: Sequence) -> None:
        """Add a sequence in which another instance takes part from the next step on."""
        if not self.is_new(seq):
            self._joined[seq.id] = seq

    @property
    def joined(self) -> Collection[Sequence]:
        """Running sequences that an instance has joined without knowing them yet."""
        return self._joined.values()

    def add_ended(self, seq: Sequence) -> Copies:
        """Add a sequence that no longer runs. Returns its copies if no rank knows the sequence."""
        self._joined.pop(seq.id, None)
        started = self._started.pop(seq.id, None)
        if started is None:
            self._ended.append((seq.id, seq.schedule.instances))
        return () if started is None else started.copies

    def has_ends_for(self, turn: Turn) -> bool:
        """Return whether the turn's step carries the end of a sequence."""
        return any(turn.has(instances) for _, instances in self._ended)

    @property
    def ended_ids(self) -> set[int]:
        """Ids of ended sequences whose end some rank has not received yet."""
        return {id for id, _ in self._ended}

    @property
    def has_ends(self) -> bool:
        return bool(self._ended)

    def take_started(self, turn: Turn) -> tuple[tuple[NewSequence, ...], Copies]:
        """Return the sequences that start with the turn's step, and the block copies for them."""
        taken = [started for started in self._started.values() if turn.has(started.seq.schedule.instances)]
        for started in taken:
            del self._started[started.seq.id]
        return tuple(map(_with_instances, taken)), tuple(copy for started in taken for copy in started.copies)

    def take_joined(self, turn: Turn) -> tuple[NewSequence, ...]:
        """Return the running sequences that another instance joins with the turn's step.

        No step that samples a token of these sequences is in flight, so their state here is the one that the instance
        needs.
        """
        joined = [seq for seq in self._joined.values() if turn.has(seq.schedule.instances)]
        for seq in joined:
            del self._joined[seq.id]
        return tuple(map(_joined, joined))

    def take_ended(self, turn: Turn) -> tuple[int, ...]:
        """Return the ids of the sequences whose end the turn's step carries."""
        taken, remaining = [], []
        for id, instances in self._ended:
            untold = tuple(rank for rank in instances if turn.instances and rank not in turn.instances)
            if turn.has(instances):
                taken.append(id)
            if untold:
                remaining.append((id, untold))
        self._ended = remaining
        return tuple(taken)


def _with_instances(started: StartedSequence) -> NewSequence:
    """Return what the ranks receive. More instances may have joined since the request was admitted."""
    instances = started.seq.schedule.instances
    return msgspec.structs.replace(started.new, instances=instances) if instances else started.new


def _joined(seq: Sequence) -> NewSequence:
    """Describe a running sequence to an instance that has none of its KV. Other instances have all of its tokens."""
    kv = seq.kv
    request = seq.request
    return NewSequence(
        id=seq.id,
        sampling=request.sampling,
        seed=request.seed,
        capacity_tokens=request.capacity_tokens,
        kv=InitialKV(
            blocks_per_rank=tuple(kv.room),
            spread=kv.placement.spread,
            cached_tokens=seq.known_length,
            cached_blocks=(Block(kv.last_owner, 0),) * (1 + len(kv.windows)) if kv.num_blocks else (),
        ),
        known=KnownTokens(last_id=seq.tokens.output[-1]) if seq.tokens.output else NO_TOKENS,
        instances=seq.schedule.instances,
        images=request.images,
    )
