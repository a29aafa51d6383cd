"""What one step of a stage computes, counted over all ranks."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array, Layouts

Number = float | Array


@dataclass(frozen=True)
class Work:
    """Rows and KV of one mixed batch; every field a number or an array over layouts.

    decode_rows: requests with one row each; decode_kv_tokens: the lengths of their KV, summed. chunk_rows: rows of
    prefill chunks, of one request; chunk_kv_tokens: the KV that they read; chunk_pairs: row and key, causal.
    sampled_rows: rows whose logits are wanted.
    """

    decode_rows: Number = 0.0
    decode_kv_tokens: Number = 0.0
    chunk_rows: Number = 0.0
    chunk_kv_tokens: Number = 0.0
    chunk_pairs: Number = 0.0
    sampled_rows: Number = 0.0

    @classmethod
    def decode(cls, batch: Number, context: Number) -> "Work":
        """One token for each of `batch` requests that hold `context` tokens."""
        return cls(decode_rows=batch, decode_kv_tokens=batch * context, sampled_rows=batch)

    @classmethod
    def chunk(cls, rows: Number, prefix: Number) -> "Work":
        """`rows` tokens of a prompt after `prefix` others."""
        return cls(chunk_rows=rows, chunk_kv_tokens=prefix + rows, chunk_pairs=rows * (prefix + (rows + 1) / 2))

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.decode_rows + other.decode_rows,
            self.decode_kv_tokens + other.decode_kv_tokens,
            self.chunk_rows + other.chunk_rows,
            self.chunk_kv_tokens + other.chunk_kv_tokens,
            self.chunk_pairs + other.chunk_pairs,
            self.sampled_rows + other.sampled_rows,
        )

    @property
    def rows(self) -> Number:
        return self.decode_rows + self.chunk_rows

    def of_rank(self, layouts: Layouts) -> "Work":
        """The fullest KVP rank's part of the attention: its tokens of every request, or all of its own requests."""
        decodes = np.asarray(self.decode_rows, dtype=np.float64)
        own = np.ceil(decodes / layouts.kvp)
        decode_share = np.where(layouts.local, own / np.maximum(decodes, 1.0), 1 / layouts.kvp)
        chunk_share = np.where(layouts.local, 1.0, 1 / layouts.kvp)
        return Work(
            decode_rows=np.where(layouts.local, own, decodes),
            decode_kv_tokens=self.decode_kv_tokens * decode_share,
            chunk_rows=self.chunk_rows,
            chunk_kv_tokens=self.chunk_kv_tokens * chunk_share,
            chunk_pairs=self.chunk_pairs * chunk_share,
            sampled_rows=self.sampled_rows,
        )
