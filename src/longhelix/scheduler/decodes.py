"""The sequences that decode: each has one row in every step."""

import math
from collections import Counter, defaultdict

from longhelix.request import Work
from longhelix.scheduler.sequence import Sequence


class Decodes:
    """A set of sequences that grow by one token in every round. A round costs only what it changes, however many
    sequences there are.

    A sequence is looked at only in the rounds in which it is due: when its row needs a KV block, and after its last
    row. In between, its length follows from the number of rounds.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._round = 0
        self._sequences: set[Sequence] = set()
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # by round
        self._most_blocks: int | None = 0
        self._tbt_slos_s: Counter[float] = Counter()
        self.kv_tokens = 0  # of all of them

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    @property
    def most_blocks(self) -> int:
        """The most KV blocks that any of the sequences has on one rank."""
        if self._most_blocks is None:
            self._most_blocks = max((seq.most_blocks for seq in self._sequences), default=0)
        return self._most_blocks

    @property
    def tbt_slo_s(self) -> float:
        """The least time between tokens that any of the sequences asks for."""
        return min(self._tbt_slos_s, default=math.inf)

    def has_more_rows(self, seq: Sequence) -> bool:
        """Whether one of the sequences has not had its last row."""
        return seq.length + self._round - seq.looked_at < seq.num_rows

    @property
    def work(self) -> Work:
        """That of a row of each."""
        rows = len(self._sequences)
        return Work(rows, self.kv_tokens, sampled_rows=rows)

    def next_growing(self) -> list[Sequence]:
        """The sequences whose row in the next round needs a KV block."""
        next_round = self._round + 1
        return [
            seq
            for seq in self._due.get(next_round, ())
            if seq.due == next_round and seq.length + next_round - seq.looked_at <= seq.num_rows
        ]

    def longest(self) -> Sequence | None:
        """The longest of the sequences that have more rows; of equal ones that which came first."""
        left = (seq for seq in self._sequences if self.has_more_rows(seq))
        return max(left, key=lambda seq: (seq.length + self._round - seq.looked_at, -seq.id), default=None)

    def join(self, seq: Sequence) -> None:
        """From the next round on, the sequence has a row."""
        if (tbt_slo_s := seq.request.service.tbt_slo_s) is not None:
            self._tbt_slos_s[tbt_slo_s] += 1
        self._sequences.add(seq)
        self.kv_tokens += seq.length
        seq.looked_at = self._round
        self.look_again(seq)

    def look_again(self, seq: Sequence) -> None:
        """Set the round in which a sequence is due, from the KV blocks that it has now."""
        seq.due = self._round + 1 + min(seq.num_blocks * self._block_tokens, seq.num_rows) - seq.length
        self._due[seq.due].append(seq)
        if self._most_blocks is not None and seq.most_blocks > self._most_blocks:
            self._most_blocks = seq.most_blocks

    def recount(self) -> None:
        """A sequence has other numbers of blocks on its ranks."""
        self._most_blocks = None

    def leave(self, seq: Sequence) -> None:
        if seq in (due := self._due.get(seq.due, [])):  # it may come back, or be due in another set
            due.remove(seq)
        seq.length += self._round - seq.looked_at
        seq.due = 0
        self._sequences.remove(seq)
        if (tbt_slo_s := seq.request.service.tbt_slo_s) is not None:
            self._tbt_slos_s[tbt_slo_s] -= 1
            self._tbt_slos_s += Counter()  # without what is 0
        self.kv_tokens -= seq.length
        if self._most_blocks is not None and seq.most_blocks >= self._most_blocks:
            self._most_blocks = None

    def advance(self) -> tuple[list[Sequence], list[Sequence]]:
        """Begin the next round. Returns the sequences that were done before it, and those whose row in it needs a KV
        block."""
        new_round = self._round + 1
        done, growing = [], []
        for seq in self._due.pop(new_round, ()):
            if seq.due != new_round:
                continue
            length = seq.length + new_round - seq.looked_at
            if length > seq.num_rows:
                done.append(seq)
            else:
                seq.length, seq.looked_at = length, new_round
                growing.append(seq)
        for seq in done:
            self.leave(seq)
        self._round = new_round
        self.kv_tokens += len(self._sequences)
        return done, growing
