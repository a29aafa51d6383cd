"""The work of a step, rank by rank, and the KVP rank with the most work."""

from typing import NamedTuple

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.work import Cost, Work


class _RankWork(NamedTuple):
    """The work on KV that is not spread evenly, by KVP rank.

    Attributes:
        decode_kv_tokens: KV tokens that decodes read.
        chunk_kv_tokens: KV tokens that chunks read.
        pairs: Pairs of a row and a key of chunks.
    """

    decode_kv_tokens: list[int]
    chunk_kv_tokens: list[int]
    pairs: list[float]


class Load:
    """The work of a step while the scheduler makes it.

    Ranks exchange in every layer, so a step takes as long as its fullest KVP rank. Evenly spread KV counts the same for
    all ranks. Other KV counts for the rank that has it.
    """

    __slots__ = (
        "_chunk_kv_tokens",
        "_decode_kv_tokens",
        "_kvp",
        "_pairs",
        "_parts",
        "_rank_work",
        "_sampled_rows",
        "chunk_rows",
        "decode_rows",
        "num_drafts",
    )  # fmt: skip

    def __init__(self, kvp: int, parts: int = 1) -> None:
        """parts: see `Work`."""
        self._kvp, self._parts = kvp, parts
        self.decode_rows = self.chunk_rows = self.num_drafts = self._sampled_rows = 0
        self._decode_kv_tokens = self._chunk_kv_tokens = 0
        self._pairs: float = 0
        self._rank_work: _RankWork | None = None  # None while all KV is spread evenly, which is common

    def copy(self) -> "Load":
        copied = Load(self._kvp, self._parts)
        copied.decode_rows, copied.chunk_rows = self.decode_rows, self.chunk_rows
        copied.num_drafts = self.num_drafts
        copied._sampled_rows, copied._pairs = self._sampled_rows, self._pairs
        copied._decode_kv_tokens, copied._chunk_kv_tokens = self._decode_kv_tokens, self._chunk_kv_tokens
        if (rank_work := self._rank_work) is not None:
            copied._rank_work = _RankWork(
                rank_work.decode_kv_tokens.copy(), rank_work.chunk_kv_tokens.copy(), rank_work.pairs.copy()
            )
        return copied

    def _uneven(self) -> "_RankWork":
        if self._rank_work is None:
            self._rank_work = _RankWork([0] * self._kvp, [0] * self._kvp, [0] * self._kvp)
        return self._rank_work

    @property
    def has_decodes(self) -> bool:
        """Whether a request waits for its next token."""
        return self.decode_rows > 0 or self.num_drafts > 0

    def add_decodes(self, decodes: Decodes) -> None:
        """Add a row of each sequence that decodes."""
        rows = len(decodes)
        self.decode_rows += rows
        self._sampled_rows += rows
        self._decode_kv_tokens += decodes.kv_tokens
        if decodes.num_even < rows:
            _add(self._uneven().decode_kv_tokens, decodes.rank_tokens)

    def add_decodes_of(self, rank: int, decodes: Decodes) -> None:
        """Add a row of each sequence that decodes, for one KVP rank only."""
        rows = len(decodes)
        self.decode_rows += rows
        self._sampled_rows += rows
        self._decode_kv_tokens += decodes.kv_tokens
        if decodes.num_even < rows:
            self._uneven().decode_kv_tokens[rank] += decodes.rank_tokens[rank]

    def add_decode(self, seq: Sequence) -> None:
        """Add a row of a sequence that is about to decode."""
        self.decode_rows += 1
        self._sampled_rows += 1
        if seq.kv.placement.even:
            self._decode_kv_tokens += seq.length
        else:
            _add(self._uneven().decode_kv_tokens, seq.rank_tokens)

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Add the next tokens of a prompt, which need not have KV blocks yet."""
        self._sampled_rows += num_tokens == seq.prompt_left
        if seq.is_scored:
            self._sampled_rows += len(seq.scored(num_tokens))
        if seq.kv.placement.even:
            self._add_even_rows(seq, num_tokens)
            return
        self.chunk_rows += num_tokens
        rank_work = self._uneven()
        for rank, kv_tokens in enumerate(seq.rank_tokens):
            rank_work.chunk_kv_tokens[rank] += kv_tokens
            rank_work.pairs[rank] += num_tokens * kv_tokens
        _add_rows(seq, num_tokens, rank_work.chunk_kv_tokens, rank_work.pairs)

    def add_draft(self, seq: Sequence, num_tokens: int) -> None:
        """Add the last token of a sequence that decodes, and its draft tokens, which have KV blocks.

        All rows read the KV together, like the rows of a chunk.
        """
        self.num_drafts += 1
        self._sampled_rows += num_tokens
        if seq.kv.placement.even:
            self._add_even_rows(seq, num_tokens)
            return
        self.chunk_rows += num_tokens
        rank_work, local_length = self._uneven(), seq.kv.placement.local_length
        for rank in range(self._kvp):
            lengths = [local_length(rank, seq.length + row + 1) for row in range(num_tokens)]
            rank_work.chunk_kv_tokens[rank] += lengths[-1]
            rank_work.pairs[rank] += sum(lengths)

    def _add_even_rows(self, seq: Sequence, num_tokens: int) -> None:
        self.chunk_rows += num_tokens
        self._chunk_kv_tokens += seq.length + num_tokens
        self._pairs += num_tokens * (seq.length + (num_tokens + 1) / 2)

    def _work(self, decode_kv_tokens: int = 0, chunk_kv_tokens: int = 0, pairs: float = 0) -> Work:
        """Return the work of a rank with these amounts of KV that is not spread evenly."""
        return Work(
            self.decode_rows,
            self._decode_kv_tokens + self._kvp * decode_kv_tokens,
            self.chunk_rows,
            self._chunk_kv_tokens + self._kvp * chunk_kv_tokens,
            chunk_pairs=self._pairs + self._kvp * pairs,
            sampled_rows=self._sampled_rows,
            parts=self._parts,
        )

    def _works(self, rank_work: _RankWork) -> list[Work]:
        """Return the work of each rank that may be the fullest: no other rank has at least as much of everything."""
        decode, chunk, pairs = rank_work
        most_tokens = max(decode)
        if not self.chunk_rows:
            return [self._work(most_tokens)]
        most = decode.index(most_tokens)  # no rank without chunks has more
        ranks = [rank for rank in range(self._kvp) if pairs[rank] or rank == most]
        fullest = list[tuple[int, int, float]]()
        for amounts in sorted([(decode[rank], chunk[rank], pairs[rank]) for rank in ranks], reverse=True):
            for other in fullest:
                if other[1] >= amounts[1] and other[2] >= amounts[2]:
                    break
            else:
                fullest.append(amounts)
        return [self._work(*amounts) for amounts in fullest]

    def seconds(self, cost: Cost) -> float:
        """Return the predicted seconds of the step."""
        return (
            cost.seconds(self._work())
            if self._rank_work is None
            else max(map(cost.seconds, self._works(self._rank_work)))
        )

    def fullest(self, cost: Cost | None) -> Work:
        """Return the work of the rank that takes longest, or without a cost has the most pairs of row and key."""
        if self._rank_work is None:
            return self._work()
        works = self._works(self._rank_work)
        if cost is None:
            return max(works, key=lambda work: work.decode_kv_tokens + work.chunk_pairs)
        return works[0] if len(works) == 1 else max(works, key=cost.seconds)


class TeamLoad:
    """The work of a step of KVP instances with their own clocks. The step takes as long as its fullest instance.

    loads: the work of each instance, which contains only the rows that it takes part in.
    """

    def __init__(self, loads: dict[int, Load]) -> None:
        self._loads = loads

    @property
    def decode_rows(self) -> int:
        return max(load.decode_rows for load in self._loads.values())

    @property
    def chunk_rows(self) -> int:
        return max(load.chunk_rows for load in self._loads.values())

    @property
    def has_decodes(self) -> bool:
        return any(load.has_decodes for load in self._loads.values())

    def copy(self) -> "TeamLoad":
        return TeamLoad({instance: load.copy() for instance, load in self._loads.items()})

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        for instance in seq.schedule.instances:
            self._loads[instance].add_chunk(seq, num_tokens)

    def add_draft(self, seq: Sequence, num_tokens: int) -> None:
        for instance in seq.schedule.instances:
            self._loads[instance].add_draft(seq, num_tokens)

    def seconds(self, cost: Cost) -> float:
        return max(load.seconds(cost) for load in self._loads.values())

    def fullest(self, cost: Cost | None) -> Work:
        works = [load.fullest(cost) for load in self._loads.values()]
        if cost is None:
            return max(works, key=lambda work: work.rows)
        return works[0] if len(works) == 1 else max(works, key=cost.seconds)


AnyLoad = Load | TeamLoad


def _add_rows(seq: Sequence, num_tokens: int, tokens: list[int], pairs: list[float]) -> None:
    """Add the KV and pairs of a chunk's tokens. Its own row and all later rows of the chunk see a token."""
    kv = seq.kv
    block_tokens, last = kv.placement.block_tokens, kv.last_owner
    filled = min(kv.num_blocks * block_tokens - seq.length, num_tokens)
    new_blocks = -(-(num_tokens - filled) // block_tokens)
    tokens[last] += filled
    pairs[last] += filled * (num_tokens - (filled - 1) / 2)
    for rank, count, places in kv.placement.shares(last, kv.num_blocks, new_blocks) if new_blocks else ():
        step = places.step or 1
        start = filled + block_tokens * (places.start + step * (count - 1) / 2)  # of a block, on the average
        tokens[rank] += count * block_tokens
        pairs[rank] += count * block_tokens * (num_tokens - start - (block_tokens - 1) / 2)
        if places.start + step * (count - 1) == new_blocks - 1:
            beyond = filled + new_blocks * block_tokens - num_tokens  # room in the last block
            tokens[rank] -= beyond
            pairs[rank] += beyond * (beyond - 1) / 2


def _add(totals: list[int], amounts: list[int]) -> None:
    for rank, tokens in enumerate(amounts):
        totals[rank] += tokens
