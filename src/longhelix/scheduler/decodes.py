"""Sets of sequences that decode, with one row of each in every step."""

import math
from collections import Counter, defaultdict

from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.work import Work


class Decodes:
    """A set of sequences that grow by one token in every round.

    A round visits only the sequences that are due in it: when a row needs a KV block, and after the last row. In
    between, the length of a sequence follows from the number of rounds.

    Attributes:
        num_even: Number of sequences whose KV is spread evenly.
        kv_tokens: KV tokens of these sequences.
        rank_tokens: KV tokens of the other sequences, by KVP rank.
    """

    def __init__(self, block_tokens: int, kvp: int) -> None:
        self._block_tokens = block_tokens
        self._round = 0
        self._sequences: set[Sequence] = set()
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # by round
        self._most_blocks: int | None = 0
        self._tbt_slos_s: Counter[float] = Counter()
        self.kv_tokens = 0
        self.rank_tokens = [0] * kvp
        self.num_even = 0
        self._num_writing = [0] * kvp  # of the other sequences, by the rank that they write to

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    @property
    def most_blocks(self) -> int:
        """The most KV blocks that any sequence has on one rank."""
        if self._most_blocks is None:
            self._most_blocks = max((seq.kv.most_blocks for seq in self._sequences), default=0)
        return self._most_blocks

    @property
    def tbt_slo_s(self) -> float:
        """The shortest time between tokens that any sequence asks for. Infinite if none does."""
        return min(self._tbt_slos_s, default=math.inf)

    def has_more_rows(self, seq: Sequence) -> bool:
        """Return whether a sequence of the set has rows after this round."""
        schedule = seq.schedule
        return seq.length + self._round - schedule.looked_at < schedule.num_rows

    @property
    def work(self) -> Work:
        """The work of a row of each sequence."""
        rows = len(self._sequences)
        return Work(rows, self.kv_tokens, sampled_rows=rows)

    def next_growing(self) -> list[Sequence]:
        """Return the sequences whose row in the next round needs a KV block."""
        next_round = self._round + 1
        return [
            seq
            for seq in self._due.get(next_round, ())
            if (schedule := seq.schedule).due == next_round
            and seq.length + next_round - schedule.looked_at <= schedule.num_rows
        ]

    def longest(self) -> Sequence | None:
        """Return the longest sequence that has more rows. Among equally long ones, the one with the lowest id."""
        unfinished = (seq for seq in self._sequences if self.has_more_rows(seq))
        return max(
            unfinished, key=lambda seq: (seq.length + self._round - seq.schedule.looked_at, -seq.id), default=None
        )

    def join(self, seq: Sequence) -> None:
        """Add a sequence, which has a row from the next round on."""
        if (tbt_slo_s := seq.request.service.tbt_slo_s) is not None:
            self._tbt_slos_s[tbt_slo_s] += 1
        self._sequences.add(seq)
        seq.schedule.looked_at = self._round
        self._count(seq)
        self._look(seq)

    def grew(self, seq: Sequence) -> None:
        """Note that a sequence got the KV block that its row of this round needs."""
        kv, schedule = seq.kv, seq.schedule
        if not kv.placement.even and kv.last_owner != schedule.counted_on:
            for rank, change in ((schedule.counted_on, -1), (kv.last_owner, 1)):
                self.rank_tokens[rank] += change
                self._num_writing[rank] += change
            schedule.counted_on = kv.last_owner
        self._look(seq)

    def _look(self, seq: Sequence) -> None:
        """Set the next round in which a sequence is due, from the KV blocks that it has now."""
        kv, schedule = seq.kv, seq.schedule
        schedule.due = self._round + 1 + min(kv.num_blocks * self._block_tokens, schedule.num_rows) - seq.length
        self._due[schedule.due].append(seq)
        if self._most_blocks is not None and kv.most_blocks > self._most_blocks:
            self._most_blocks = kv.most_blocks

    def recount(self) -> None:
        """Count all tokens again, after blocks have moved between ranks."""
        self._most_blocks = None
        self.kv_tokens = self.num_even = 0
        self.rank_tokens, self._num_writing = [0] * len(self.rank_tokens), [0] * len(self.rank_tokens)
        for seq in self._sequences:
            self._count(seq)

    def _count(self, seq: Sequence, times: int = 1) -> None:
        """Add a sequence's tokens to the counts. times: -1 removes them."""
        schedule = seq.schedule
        since = self._round - schedule.looked_at
        if seq.kv.placement.even:
            self.num_even += times
            self.kv_tokens += times * (seq.length + since)
            return
        schedule.counted_on = seq.kv.last_owner
        self._num_writing[schedule.counted_on] += times
        self.rank_tokens[schedule.counted_on] += times * since
        for rank, tokens in enumerate(seq.rank_tokens):
            self.rank_tokens[rank] += times * tokens

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence."""
        schedule = seq.schedule
        if seq in (due := self._due.get(schedule.due, [])):  # it may come back, or be due in another set
            due.remove(seq)
        self._count(seq, -1)
        seq.length += self._round - schedule.looked_at
        schedule.due = 0
        self._sequences.remove(seq)
        if (tbt_slo_s := seq.request.service.tbt_slo_s) is not None:
            self._tbt_slos_s[tbt_slo_s] -= 1
            self._tbt_slos_s += Counter()  # drops zero counts
        if self._most_blocks is not None and seq.kv.most_blocks >= self._most_blocks:
            self._most_blocks = None

    def advance(self) -> tuple[list[Sequence], list[Sequence]]:
        """Begin the next round.

        Returns:
            The sequences that have had their last row, and those whose row in this round needs a KV block.
        """
        new_round = self._round + 1
        done, growing = [], []
        for seq in self._due.pop(new_round, ()):
            schedule = seq.schedule
            if schedule.due != new_round:
                continue
            length = seq.length + new_round - schedule.looked_at
            if length > schedule.num_rows:
                done.append(seq)
            else:
                seq.length, schedule.looked_at = length, new_round
                growing.append(seq)
        for seq in done:
            self.leave(seq)
        self._round = new_round
        self.kv_tokens += self.num_even
        if self.num_even < len(self._sequences):
            for rank, num_writing in enumerate(self._num_writing):
                self.rank_tokens[rank] += num_writing
        return done, growing
