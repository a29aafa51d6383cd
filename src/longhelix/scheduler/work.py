"""The work of a step, from which its time is predicted: numbers of rows and KV tokens."""

from operator import add
from typing import Any, NamedTuple, Protocol

# The fewest rows of a part with chunks. Fewer rows attend in less time than an exchange takes to start.
PART_ROWS = 64
# How many of a row's largest logits ranks gather. They usually include all tokens that top-k and top-p leave.
CANDIDATES = 64

Number = Any  # a number, or an array of numbers


class Work(NamedTuple):
    """The work of a step. Fields are arrays if many steps are priced at once.

    KV tokens and pairs are KVP times those of the fullest KVP rank, because the other ranks wait for it. If KV is
    spread evenly, these are the sums over all ranks.

    Attributes:
        decode_rows: Sequences with one row each.
        decode_kv_tokens: KV tokens of these sequences.
        chunk_rows: Rows of prefill chunks and drafts.
        chunk_kv_tokens: KV tokens that these rows read.
        chunk_pairs: Causal pairs of such a row and a key.
        sampled_rows: Rows whose logits are computed.
        parts: Number of parts in which the rows attend. A part is exchanged while the next one attends (HOP-B). 0: one
            KVP instance has all rows, and nothing is exchanged.
    """

    decode_rows: Number = 0
    decode_kv_tokens: Number = 0
    chunk_rows: Number = 0
    chunk_kv_tokens: Number = 0
    chunk_pairs: Number = 0
    sampled_rows: Number = 0
    parts: Number = 1

    @classmethod
    def decode(cls, batch: Number, context: Number) -> "Work":
        """Return the work of one token for each of `batch` requests with `context` tokens each, spread evenly."""
        return cls(decode_rows=batch, decode_kv_tokens=batch * context, sampled_rows=batch)

    @classmethod
    def chunk(cls, rows: Number, prefix: Number, *, sampled: bool = False) -> "Work":
        """Return the work of `rows` tokens of a prompt after `prefix` others, spread evenly.

        sampled: whether the last of them is the prompt's last token.
        """
        return cls(
            chunk_rows=rows,
            chunk_kv_tokens=prefix + rows,
            chunk_pairs=rows * (prefix + (rows + 1) / 2),
            sampled_rows=int(sampled),
        )

    @classmethod
    def growing_chunk(cls, rows: float, prefix: float, kvp: int, alone_tokens: float) -> "Work":
        """Return the work of a chunk if each of `kvp` ranks is filled to `alone_tokens` before the next one joins."""

        def counted(tokens: float) -> float:
            return max(tokens, kvp * min(tokens, alone_tokens))

        return cls(
            chunk_rows=rows,
            chunk_kv_tokens=counted(prefix + rows),
            chunk_pairs=rows * counted(prefix + (rows + 1) / 2),
        )

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]  # tuples are joined by it, work adds up
        """Return the work of both in one step, of one part."""
        return Work(*map(add, self[:-1], other[:-1]))

    @property
    def rows(self) -> Number:
        return self.decode_rows + self.chunk_rows

    @property
    def most_parts(self) -> Number:
        """The most parts in which the rows can attend. May be 0.

        Parts are even, and in order: decodes first. Without chunks, a part has at least one row, otherwise PART_ROWS.
        """
        return self.rows // (1 + (PART_ROWS - 1) * (self.chunk_rows > 0))


NO_WORK = Work()


class Cost(Protocol):
    """Predicts the time of steps on the machine that runs them."""

    def seconds(self, work: Work) -> float: ...
