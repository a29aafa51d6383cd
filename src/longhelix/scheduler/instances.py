"""KVP instances with their own clocks: in the tied layout, each has the whole model and can step without others."""

from collections import Counter
from collections.abc import Collection, Set

from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.growth import choose_ranks
from longhelix.scheduler.load import Load, TeamLoad
from longhelix.scheduler.pending_changes import PendingChanges
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Turn


class Instances:
    """The decoding sequences of KVP instances that step in teams. Implements `Turns`.

    An instance takes part in a sequence once it has KV of it, or is about to. Then it computes all its rows. Instances
    that share a sequence are in one team, directly or through other instances. A step is for one team, so no instance
    waits for an instance with which it shares nothing.

    A growing sequence takes the next instance when its last block is full, before the row that needs the new block. An
    instance that joins a decoding sequence does not know its tokens, so the sequence must have no step in flight then.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, changes: PendingChanges) -> None:
        self._kvp = kvp = config.kvp
        self._block_tokens = config.block_tokens
        self._chooses = not config.placement.batch_invariant
        self._pool = pool
        self._changes = changes
        self._decodes: dict[tuple[int, ...], Decodes] = {}  # by instances
        self._joining: list[Sequence] = []
        self._running: Counter[tuple[int, ...]] = Counter()
        self._last_step = [0] * kvp
        self._in_flight = [0] * kvp

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._decodes.get(seq.schedule.instances, ())

    def may_begin(self, busy: Set[int]) -> bool:
        return len(busy) < self._kvp

    def begin(self, seq: Sequence) -> None:
        kv = seq.kv
        owners = dict.fromkeys(rank for rank, blocks in enumerate(kv.block_ids) if blocks)
        first = kv.placement.start
        ranks = range(self._kvp) if kv.placement.spread else owners
        seq.schedule.instances = (first, *(rank for rank in ranks if rank != first))
        self._running[seq.schedule.instances] += 1

    def prompt_done(self, seq: Sequence, step_id: int) -> None:
        self._joining.append(seq)

    def leave(self, seq: Sequence) -> None:
        if seq in self:
            self._decodes[seq.schedule.instances].leave(seq)
        elif seq in self._joining:
            self._joining.remove(seq)
        self._running[seq.schedule.instances] -= 1
        self._running += Counter()  # drops zero counts

    def _join_set(self, seq: Sequence) -> None:
        self._decodes.setdefault(seq.schedule.instances, Decodes(self._block_tokens, self._kvp)).join(seq)

    def _reach(self, seq: Sequence) -> None:
        """Let the instance take part in a sequence that gets the KV block of its next row."""
        schedule = seq.schedule
        if self._pool.next_owner(seq) in schedule.instances:
            return
        if self._chooses:
            choose_ranks(seq, seq.kv.num_blocks + 1, self._pool.allocators, self._pool.windows)
        owner = self._pool.next_owner(seq)
        decodes = seq in self
        if decodes:
            self._decodes[schedule.instances].leave(seq)
        self._running[schedule.instances] -= 1
        self._running += Counter()
        lead, *followers = schedule.instances
        schedule.instances = (lead, *sorted([*followers, owner]))  # sorted, so that equal teams have equal keys
        self._running[schedule.instances] += 1
        if decodes:
            self._join_set(seq)
        self._changes.add_joined(seq)

    def in_turn(self, step_id: int, oldest_id: int, busy: Set[int], prompts: Collection[Sequence]) -> list[Turn]:
        """See `Turns`. The team whose last step is the longest ago comes first."""
        self._decodes = {instances: decodes for instances, decodes in self._decodes.items() if len(decodes)}
        begun = (seq for seq in (*prompts, *self._joining) if seq.length == seq.kv.num_blocks * self._block_tokens)
        decoding = (seq for decodes in self._decodes.values() for seq in decodes.next_growing())
        for seq in [*begun, *decoding]:
            self._reach(seq)
        with_rows = {instance for seq in prompts for instance in seq.schedule.instances}
        with_rows |= {
            instance
            for instances in (*self._decodes, *(seq.schedule.instances for seq in self._joining))
            for instance in instances
        }
        turns = [Turn(instances=team) for team in self._teams() if busy.isdisjoint(team)]
        turns = [turn for turn in turns if not with_rows.isdisjoint(turn.instances) or self._changes.has_ends_for(turn)]
        turns = [turn for turn in turns if self._has_tokens(turn)]
        return sorted(turns, key=lambda turn: max(self._last_step[instance] for instance in turn.instances))

    def _has_tokens(self, turn: Turn) -> bool:
        """Return whether the last tokens of all sequences that another instance joins are known."""
        return not any(
            any(self._in_flight[instance] for instance in seq.schedule.instances)
            for seq in self._changes.joined
            if not seq.prompt_left and turn.has(seq.schedule.instances)
        )

    def _teams(self) -> list[tuple[int, ...]]:
        """Return the teams: sets of instances that share sequences, directly or through others."""
        teams = [{instance} for instance in range(self._kvp)]
        for instances in self._running:
            if len(instances) > 1:
                joined = [team for team in teams if not team.isdisjoint(instances)]
                teams = [team for team in teams if team.isdisjoint(instances)] + [set().union(*joined)]
        return [tuple(sorted(team)) for team in teams]

    def deal(self) -> list[Sequence]:
        return []

    def join(self, turn: Turn, step_id: int, oldest_id: int) -> list[Sequence]:
        joined = [seq for seq in self._joining if turn.has(seq.schedule.instances)]
        for seq in joined:
            self._joining.remove(seq)
            self._join_set(seq)
        return joined

    def decoding(self, turn: Turn) -> list[Decodes]:
        return [decodes for instances, decodes in self._decodes.items() if turn.has(instances)]

    def load(self, turn: Turn) -> TeamLoad:
        # The instances of a team exchange. A single one does not.
        loads = {instance: Load(self._kvp, parts=int(len(turn.instances) > 1)) for instance in turn.instances}
        for instances, decodes in self._decodes.items():
            for instance in instances:
                if instance in loads:
                    loads[instance].add_decodes_of(instance, decodes)
        return TeamLoad(loads)

    def tbt_slo_s(self, turn: Turn) -> float:
        return min((decodes.tbt_slo_s for decodes in self.decoding(turn)), default=float("inf"))

    def may_lose(self, seq: Sequence) -> bool:
        return seq in self

    def grew(self, seq: Sequence) -> None:
        self._decodes[seq.schedule.instances].grew(seq)

    def recount(self) -> None:
        for decodes in self._decodes.values():
            decodes.recount()

    def began(self, turn: Turn, step_id: int) -> None:
        for instance in turn.instances:
            self._last_step[instance] = step_id
            self._in_flight[instance] += 1

    def ended(self, turn: Turn) -> None:
        for instance in turn.instances:
            self._in_flight[instance] -= 1


def tokens_within(seq: Sequence, num_tokens: int) -> int:
    """Return how many of a prompt's next tokens have their KV on instances that take part in it now.

    All of them if all ranks have one clock.
    """
    if not seq.schedule.instances:
        return num_tokens
    kv = seq.kv
    block_tokens = kv.placement.block_tokens
    num_blocks = -(-(seq.length + num_tokens) // block_tokens) - kv.num_blocks
    shares = kv.placement.shares(kv.last_owner, kv.num_blocks, num_blocks) if num_blocks > 0 else ()
    beyond = [share.places.start for share in shares if share.rank not in seq.schedule.instances]
    return min(num_tokens, (kv.num_blocks + min(beyond)) * block_tokens - seq.length) if beyond else num_tokens
