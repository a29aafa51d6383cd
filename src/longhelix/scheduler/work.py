"""What a step computes, as it is priced: how many rows, against how much KV."""

from operator import add
from typing import Any, NamedTuple, Protocol

# Of rows of chunks a part has at least so many: fewer attend in less time than an exchange takes to start.
PART_ROWS = 64
# Of a row's logits the largest, which ranks gather: what top-k and top-p usually leave is among them.
CANDIDATES = 64

Number = Any  # one, or an array of them


class Work(NamedTuple):
    """What a step computes; arrays where many steps are priced at once.

    decode_rows: sequences with one row each; decode_kv_tokens: the lengths of their KV, summed. chunk_rows: rows of
    prefill chunks and drafts; chunk_kv_tokens: the KV that they read; chunk_pairs: row and key, causal. sampled_rows:
    rows whose logits are wanted. parts: in how many its rows attend, of which each is exchanged while the next attends
    (HOP-B); 0: one KVP instance has all of them, and nothing is exchanged.

    KV and pairs are KVP times those of the fullest KVP rank, for which the others wait: the sums over all ranks, where
    KV is spread evenly, and more than these where it is not.
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
        """One token for each of `batch` requests that hold `context` tokens, spread evenly."""
        return cls(decode_rows=batch, decode_kv_tokens=batch * context, sampled_rows=batch)

    @classmethod
    def chunk(cls, rows: Number, prefix: Number, *, sampled: bool = False) -> "Work":
        """`rows` tokens of a prompt after `prefix` others, spread evenly. sampled: the last of them is the prompt's
        last."""
        return cls(
            chunk_rows=rows,
            chunk_kv_tokens=prefix + rows,
            chunk_pairs=rows * (prefix + (rows + 1) / 2),
            sampled_rows=int(sampled),
        )

    @classmethod
    def growing_chunk(cls, rows: float, prefix: float, kvp: int, alone_tokens: float) -> "Work":
        """The same where one of `kvp` ranks has up to `alone_tokens` of it alone, then the next one."""

        def counted(tokens: float) -> float:
            return max(tokens, kvp * min(tokens, alone_tokens))

        return cls(
            chunk_rows=rows,
            chunk_kv_tokens=counted(prefix + rows),
            chunk_pairs=rows * counted(prefix + (rows + 1) / 2),
        )

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]  # tuples are joined by it, work adds up
        """Both in one step, of one part."""
        return Work(*map(add, self[:-1], other[:-1]))

    @property
    def rows(self) -> Number:
        return self.decode_rows + self.chunk_rows

    @property
    def most_parts(self) -> Number:
        """In how many parts its rows can attend: they are cut evenly, in their order, decodes first. A part may be one
        decode; with rows of chunks among them it has PART_ROWS at least. May be 0."""
        return self.rows // (1 + (PART_ROWS - 1) * (self.chunk_rows > 0))


NO_WORK = Work()


class Cost(Protocol):
    """What time steps take, on the machine that is to run them."""

    def seconds(self, work: Work) -> float: ...
