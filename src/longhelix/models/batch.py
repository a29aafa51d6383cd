"""The packed rows of one step, as the model sees them on this rank."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T rows of B sequences, one sequence after the other; all integers are int64.

    token_ids_T, positions_T. cos_TR, sin_TR: rotation of each row (float32). slots_T: where the row's KV goes in
    this rank's pool, -1 if another rank owns it. limits_T: how many of its request's local tokens a row sees.
    row_starts_B: (B + 1) first rows. blocks_BJ: local KV blocks of each sequence, padded with 0.
    max_rows: the most rows of one sequence.
    """

    token_ids_T: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    slots_T: Tensor
    limits_T: Tensor
    row_starts_B: Tensor
    blocks_BJ: Tensor
    max_rows: int

    @property
    def num_sequences(self) -> int:
        return len(self.blocks_BJ)
