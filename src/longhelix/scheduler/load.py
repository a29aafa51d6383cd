"""What a step computes, rank by rank, and which of the KVP ranks has most to do."""

from typing import NamedTuple

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.work import Cost, Work


class _Own(NamedTuple):
    """Of KV that is not spread evenly, by KVP rank: what decodes read of it, what chunks read, and the chunks' pairs of
    row and key."""

    decode_kv_tokens: list[int]
    chunk_kv_tokens: list[int]
    pairs: list[float]


class Load:
    """The work of a step while it is made. Ranks exchange in every layer, so that a step takes what its fullest KVP
    rank takes. KV that is spread evenly counts for all ranks alike, other KV for the rank that has it.
    """

    __slots__ = ("_chunk_kv_tokens", "_decode_kv_tokens", "_kvp", "_own", "_pairs", "_parts", "_sampled_rows",
                 "chunk_rows", "decode_rows", "num_drafts")  # fmt: skip

    def __init__(self, kvp: int, parts: int = 1) -> None:
        """parts: those of the work."""
        self._kvp, self._parts = kvp, parts
        self.decode_rows = self.chunk_rows = self.num_drafts = self._sampled_rows = 0
        self._decode_kv_tokens = self._chunk_kv_tokens = 0
        self._pairs: float = 0
        self._own: _Own | None = None  # where all KV is spread evenly, as it often is

    def copy(self) -> "Load":
        copied = Load(self._kvp, self._parts)
        copied.decode_rows, copied.chunk_rows = self.decode_rows, self.chunk_rows
        copied.num_drafts = self.num_drafts
        copied._sampled_rows, copied._pairs = self._sampled_rows, self._pairs
        copied._decode_kv_tokens, copied._chunk_kv_tokens = self._decode_kv_tokens, self._chunk_kv_tokens
        if (own := self._own) is not None:
            copied._own = _Own(own.decode_kv_tokens.copy(), own.chunk_kv_tokens.copy(), own.pairs.copy())
        return copied

    def _by_rank(self) -> "_Own":
        if self._own is None:
            self._own = _Own([0] * self._kvp, [0] * self._kvp, [0] * self._kvp)
        return self._own

    @property
    def has_decodes(self) -> bool:
        """Whether a request waits for its next token."""
        return self.decode_rows > 0 or self.num_drafts > 0

    def add_decodes(self, decodes: Decodes) -> None:
        """A row of each sequence that decodes."""
        rows = len(decodes)
        self.decode_rows += rows
        self._sampled_rows += rows
        self._decode_kv_tokens += decodes.kv_tokens
        if decodes.num_even < rows:
            _add(self._by_rank().decode_kv_tokens, decodes.rank_tokens)

    def add_decodes_of(self, rank: int, decodes: Decodes) -> None:
        """The same, of which one KVP rank alone is asked about."""
        rows = len(decodes)
        self.decode_rows += rows
        self._sampled_rows += rows
        self._decode_kv_tokens += decodes.kv_tokens
        if decodes.num_even < rows:
            self._by_rank().decode_kv_tokens[rank] += decodes.rank_tokens[rank]

    def add_decode(self, seq: Sequence) -> None:
        """A row of one that is about to decode."""
        self.decode_rows += 1
        self._sampled_rows += 1
        if seq.kv.placement.even:
            self._decode_kv_tokens += seq.length
        else:
            _add(self._by_rank().decode_kv_tokens, seq.rank_tokens)

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """The next tokens of a prompt, which need not have KV blocks yet."""
        self._sampled_rows += num_tokens == seq.prompt_left
        if seq.is_scored:
            self._sampled_rows += len(seq.scored(num_tokens))
        if seq.kv.placement.even:
            self._add_even_rows(seq, num_tokens)
            return
        self.chunk_rows += num_tokens
        own = self._by_rank()
        for rank, held in enumerate(seq.rank_tokens):
            own.chunk_kv_tokens[rank] += held
            own.pairs[rank] += num_tokens * held
        _add_rows(seq, num_tokens, own.chunk_kv_tokens, own.pairs)

    def add_draft(self, seq: Sequence, num_tokens: int) -> None:
        """The last token of a sequence that decodes, and its draft tokens, which have KV blocks. All rows read the KV
        together, as those of a chunk do."""
        self.num_drafts += 1
        self._sampled_rows += num_tokens
        if seq.kv.placement.even:
            self._add_even_rows(seq, num_tokens)
            return
        self.chunk_rows += num_tokens
        own, local_length = self._by_rank(), seq.kv.placement.local_length
        for rank in range(self._kvp):
            lengths = [local_length(rank, seq.length + row + 1) for row in range(num_tokens)]
            own.chunk_kv_tokens[rank] += lengths[-1]
            own.pairs[rank] += sum(lengths)

    def _add_even_rows(self, seq: Sequence, num_tokens: int) -> None:
        self.chunk_rows += num_tokens
        self._chunk_kv_tokens += seq.length + num_tokens
        self._pairs += num_tokens * (seq.length + (num_tokens + 1) / 2)

    def _work(self, decode_kv_tokens: int = 0, chunk_kv_tokens: int = 0, pairs: float = 0) -> Work:
        """That of a rank which has so much of the KV that is not spread evenly."""
        return Work(
            self.decode_rows,
            self._decode_kv_tokens + self._kvp * decode_kv_tokens,
            self.chunk_rows,
            self._chunk_kv_tokens + self._kvp * chunk_kv_tokens,
            chunk_pairs=self._pairs + self._kvp * pairs,
            sampled_rows=self._sampled_rows,
            parts=self._parts,
        )

    def _works(self, own: _Own) -> list[Work]:
        """The work of each rank that may be the fullest: no other has as much of everything."""
        decode, chunk, pairs = own
        most_tokens = max(decode)
        if not self.chunk_rows:
            return [self._work(most_tokens)]
        most = decode.index(most_tokens)  # of those without chunks none has more
        ranks = [rank for rank in range(self._kvp) if pairs[rank] or rank == most]
        found = list[tuple[int, int, float]]()
        for one in sorted([(decode[rank], chunk[rank], pairs[rank]) for rank in ranks], reverse=True):
            for other in found:
                if other[1] >= one[1] and other[2] >= one[2]:
                    break
            else:
                found.append(one)
        return [self._work(*each) for each in found]

    def seconds(self, cost: Cost) -> float:
        """What it takes by `cost`."""
        return cost.seconds(self._work()) if self._own is None else max(map(cost.seconds, self._works(self._own)))

    def fullest(self, cost: Cost | None) -> Work:
        """The work of the rank that takes longest by `cost`, or without one has the most pairs of row and key."""
        if self._own is None:
            return self._work()
        works = self._works(self._own)
        if cost is None:
            return max(works, key=lambda work: work.decode_kv_tokens + work.chunk_pairs)
        return works[0] if len(works) == 1 else max(works, key=cost.seconds)


class TeamLoad:
    """The work of a step of KVP instances with clocks of their own, by instance: each has the rows alone that it takes
    part in. The step takes what its fullest one takes."""

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
        return TeamLoad({one: load.copy() for one, load in self._loads.items()})

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        for one in seq.schedule.instances:
            self._loads[one].add_chunk(seq, num_tokens)

    def add_draft(self, seq: Sequence, num_tokens: int) -> None:
        for one in seq.schedule.instances:
            self._loads[one].add_draft(seq, num_tokens)

    def seconds(self, cost: Cost) -> float:
        return max(load.seconds(cost) for load in self._loads.values())

    def fullest(self, cost: Cost | None) -> Work:
        works = [load.fullest(cost) for load in self._loads.values()]
        if cost is None:
            return max(works, key=lambda work: work.rows)
        return works[0] if len(works) == 1 else max(works, key=cost.seconds)


AnyLoad = Load | TeamLoad


def _add_rows(seq: Sequence, num_tokens: int, tokens: list[int], pairs: list[float]) -> None:
    """The KV of a chunk's own tokens, of which all rows from its own one on see each."""
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


def _add(own: list[int], more: list[int]) -> None:
    for rank, tokens in enumerate(more):
        own[rank] += tokens
