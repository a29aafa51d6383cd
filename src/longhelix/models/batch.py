"""The packed rows of one step, as the model sees them on this rank."""

from dataclasses import dataclass

from torch import Tensor

from longhelix.layout import split
from longhelix.request import PART_ROWS


@dataclass(frozen=True)
class Batch:
    """T rows of B sequences, one sequence after the other; all integers are int64.

    token_ids_T, positions_T. cos_TR, sin_TR: rotation of each row (float32). slots_T: where the row's KV goes in
    this rank's pool, -1 if another rank owns it. limits_T: how many of its request's local tokens a row sees.
    row_starts_B: (B + 1) first rows. blocks_BJ: local KV blocks of each sequence, padded with 0.
    max_rows: the most rows of one sequence. parts: in how many parts they attend (`Step.parts`).
    """

    token_ids_T: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    slots_T: Tensor
    limits_T: Tensor
    row_starts_B: Tensor
    blocks_BJ: Tensor
    max_rows: int
    parts: int = 1

    @property
    def num_sequences(self) -> int:
        return len(self.blocks_BJ)

    def cut(self, parts: int) -> "list[Attended]":
        """The rows that attend, in at most `parts` runs: of sequences with one row each, or of one sequence's rows.

        Other batches, and a sequence of few rows, stay whole.
        """
        rows = len(self.limits_T)
        if self.max_rows == 1:
            return [self._sequences(part) for part in split(rows, min(parts, rows))]
        if self.num_sequences == 1:
            return [self._rows(part) for part in split(rows, max(1, min(parts, rows // PART_ROWS)))]
        return [Attended(slice(0, rows), self.blocks_BJ, self.row_starts_B, self.limits_T, self.max_rows)]

    def _sequences(self, part: range) -> "Attended":
        rows = slice(part.start, part.stop)
        starts_B = self.row_starts_B[part.start : part.stop + 1] - part.start
        return Attended(rows, self.blocks_BJ[rows], starts_B, self.limits_T[rows], 1)

    def _rows(self, part: range) -> "Attended":
        rows = slice(part.start, part.stop)
        starts_B = self.row_starts_B.clamp(max=len(part))
        return Attended(rows, self.blocks_BJ, starts_B, self.limits_T[rows], len(part))


@dataclass(frozen=True)
class Attended:
    """Some rows of a batch, as attention takes them."""

    rows: slice
    blocks_BJ: Tensor
    row_starts_B: Tensor
    limits_T: Tensor
    max_rows: int
