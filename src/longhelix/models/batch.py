"""The packed rows of one step, as the model sees them on this rank."""

from dataclasses import dataclass

from torch import Tensor

from longhelix.kernels import take_rows
from longhelix.layout import split
from longhelix.parallel.exchange import Holders

_PART_ROWS = 64  # of one sequence: fewer rows attend in less time than an exchange takes to start


@dataclass(frozen=True)
class Batch:
    """T rows of one sequence after the other, and for attention the t of them whose b sequences keep KV on this rank.

    All integers are int64. token_ids_T. holders: which rows are whose; None where every rank has all. cos_tR, sin_tR:
    rotation of each row (float32). slots_t: where the row's KV goes in this rank's pool, -1 if another rank owns it.
    limits_t: how many of its request's local tokens a row sees. row_starts_b: (b + 1) first rows. blocks_bJ: local KV
    blocks of each sequence, padded with 0. max_rows: the most rows of one sequence. decodes: every sequence has one.
    """

    token_ids_T: Tensor
    holders: Holders | None
    cos_tR: Tensor
    sin_tR: Tensor
    slots_t: Tensor
    limits_t: Tensor
    row_starts_b: Tensor
    blocks_bJ: Tensor
    max_rows: int
    decodes: bool

    @property
    def num_sequences(self) -> int:
        return len(self.blocks_bJ)

    def own_rows(self, hidden_TH: Tensor) -> Tensor:
        """Rows whose queries, keys and values this rank computes, hidden_tH."""
        return hidden_TH if self.holders is None else take_rows(hidden_TH, self.holders.rows_t)

    def cut(self, parts: int) -> "list[Attended]":
        """The rows that attend, in at most `parts` runs: of sequences with one row each, or of one sequence's rows.

        Other batches, and a sequence of few rows, stay whole; so does a batch of which ranks have different rows.
        """
        rows = len(self.limits_t)
        if self.holders is None and self.decodes:
            return [self._sequences(part) for part in split(rows, min(parts, rows))]
        if self.holders is None and self.num_sequences == 1:
            return [self._rows(part) for part in split(rows, max(1, min(parts, rows // _PART_ROWS)))]
        return [Attended(slice(0, rows), self.blocks_bJ, self.row_starts_b, self.limits_t, self.max_rows)]

    def _sequences(self, part: range) -> "Attended":
        rows = slice(part.start, part.stop)
        starts_b = self.row_starts_b[part.start : part.stop + 1] - part.start
        return Attended(rows, self.blocks_bJ[rows], starts_b, self.limits_t[rows], 1)

    def _rows(self, part: range) -> "Attended":
        rows = slice(part.start, part.stop)
        starts_b = self.row_starts_b.clamp(max=len(part))
        return Attended(rows, self.blocks_bJ, starts_b, self.limits_t[rows], len(part))


@dataclass(frozen=True)
class Attended:
    """Some rows of a batch, as attention takes them."""

    rows: slice
    blocks_bJ: Tensor
    row_starts_b: Tensor
    limits_t: Tensor
    max_rows: int
