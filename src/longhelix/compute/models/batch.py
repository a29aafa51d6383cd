"""The batch of one step: the packed rows that the model computes on this rank."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longhelix.compute.kernels import take_rows
from longhelix.compute.models.token_shards import TokenShards
from longhelix.compute.parallel.holders import Holding
from longhelix.compute.parallel.instance_groups import SharedRows
from longhelix.spec.layout import split


@dataclass(frozen=True)
class ImageRows:
    """The rows of a step that images fill, and their values.

    Attributes:
        mask_T: Whether an image fills a row. bool.
        states: Embeddings of these rows, then what is added to all rows after each of the first layers. states_TH each,
            zero where no image is.
    """

    mask_T: Tensor
    states: tuple[Tensor, ...]

    def embed(self, hidden_TH: Tensor) -> Tensor:
        """Hidden states before the first layer, where these rows are the images'."""
        return torch.where(self.mask_T.unsqueeze(1), self.states[0], hidden_TH)

    def add_after(self, layer: int, hidden_TH: Tensor, shards: TokenShards | None) -> Tensor:
        """Hidden states after a layer, with what the vision tower adds there."""
        if layer + 1 >= len(self.states):
            return hidden_TH
        added_TH = self.states[layer + 1]
        return hidden_TH + (added_TH if shards is None else shards.local_rows(added_TH))


class RowRotation(NamedTuple):
    """How far rows are rotated, for R pairs of channels.

    Attributes:
        cos_tR: Cosines of the angles. float32.
        sin_tR: Sines of the angles. float32.
    """

    cos_tR: Tensor
    sin_tR: Tensor


class RowView(NamedTuple):
    """What differs by KV group: where the rows' KV goes, and which tokens the rows see.

    Attributes:
        slots_t: Slot of each row's KV in the group's pool, block * block_tokens + offset. -1: another rank keeps it.
        blocks_X: Blocks of all running sequences on this rank, one sequence after the other.
        firsts_t: First local token that each row sees. None: token 0.
    """

    slots_t: Tensor
    blocks_X: Tensor
    firsts_t: Tensor | None = None


@dataclass(frozen=True)
class AttentionRows:
    """The t rows that attend on this rank: those of the b sequences that keep KV here.

    All integers are int64. A local token is one whose KV is on this rank.

    Attributes:
        row_starts_b: (b + 1) First row of each sequence, then t.
        limits_t: Local token of the row's sequence after the last one that the row sees.
        extents_b2: Where each sequence's blocks begin and end in `RowView.blocks_X`.
        max_rows: Number of rows of the sequence with the most rows.
        rotations: How far each row is rotated, for each of `ModelSpec.rotations`.
        views: What differs by KV group, for each of them (`ModelSpec.group_of`).
        is_reused: Later steps with the same number of rows reuse these tensors, and overwrite their values.
    """

    row_starts_b: Tensor
    limits_t: Tensor
    extents_b2: Tensor
    max_rows: int
    rotations: tuple[RowRotation, ...]
    views: tuple[RowView, ...]
    is_reused: bool = False


@dataclass(frozen=True)
class StepShape:
    """What the scheduler says about the size of a step. The same on all ranks.

    Attributes:
        num_sequences: Number of sequences of all T rows.
        most_tokens: No row sees more local tokens, on any rank (`Step.most_tokens`).
        parts: Number of parts in which the rows attend, one after the other (HOP-B).
    """

    num_sequences: int
    most_tokens: int
    parts: int = 1


@dataclass(frozen=True)
class RowSharding:
    """Which ranks have which rows. Without any of these, all ranks have all rows.

    Attributes:
        holders: Which KVP ranks keep KV for which rows. None: each keeps KV for all rows.
        shared: Rows that other KVP instances have too, where instances have their own clocks. None: they have not.
        token_shards: How hidden states are split over the FFN ranks between products. None: each has all rows.
        pass_shards: The same split, if a compiler pass makes it. Then norms are ops of their own, as the pass expects.
    """

    holders: Holding | None = None
    shared: tuple[SharedRows, ...] | None = None
    token_shards: TokenShards | None = None
    pass_shards: TokenShards | None = None


@dataclass(frozen=True)
class Batch:
    """The T rows of one step, one sequence after the other.

    Attributes:
        token_ids_T: Token of each row. int64.
        shape: Size of the step.
        attention: The rows that attend on this rank.
        sharding: Which ranks have which rows.
        images: Rows that images fill, on ranks of the stages that need them. None: no image is in the step.
        padding_T: Whether each row is padding of a CUDA graph. bool. None: no row is.
    """

    token_ids_T: Tensor
    shape: StepShape
    attention: AttentionRows
    sharding: RowSharding = RowSharding()
    images: ImageRows | None = None
    padding_T: Tensor | None = None

    @property
    def runs_op_by_op(self) -> bool:
        """Whether layers run op by op, because the step is unlikely to repeat: it has rows of images or shared rows."""
        return bool(self.sharding.shared) or self.images is not None

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one row."""
        return self.shape.num_sequences == len(self.token_ids_T)

    def local_rows(self, hidden_TH: Tensor) -> Tensor:
        """Return the rows whose queries, keys and values this rank computes, hidden_tH."""
        holders = self.sharding.holders
        return hidden_TH if holders is None else take_rows(hidden_TH, holders.rows_t)

    def cut(self) -> "list[BatchPart]":
        """Split all T rows evenly into `StepShape.parts` ranges, which attend in turn. The same on all ranks."""
        holders = self.sharding.holders
        if holders is None:
            ranges = split(len(self.token_ids_T), self.shape.parts)
            return [self._part(slice(part.start, part.stop), None) for part in ranges]
        return [self._part(rows, of_part) for rows, of_part in holders.cut(self.shape.parts)]

    def _part(self, rows: slice, holders: Holding | None) -> "BatchPart":
        all_rows = self.attention
        limits_t = all_rows.limits_t[rows]
        if all_rows.max_rows <= 1:
            starts_b = all_rows.row_starts_b[rows.start : rows.stop + 1] - rows.start
            extents_b2, max_rows = all_rows.extents_b2[rows], 1
        else:
            # Sequences that lie outside of the run have no rows in it.
            starts_b = all_rows.row_starts_b.clamp(rows.start, rows.stop) - rows.start
            extents_b2, max_rows = all_rows.extents_b2, min(all_rows.max_rows, rows.stop - rows.start)
        return BatchPart(
            rows=rows,
            holders=holders,
            row_starts_b=starts_b,
            limits_t=limits_t,
            extents_b2=extents_b2,
            max_rows=max_rows,
        )


@dataclass(frozen=True)
class BatchPart:
    """A range of the rows that attend on this rank.

    Attributes:
        rows: Which of the t rows.
        holders: Which KVP ranks keep KV for which rows of the part. None: each keeps KV for all rows.
        row_starts_b: As in `AttentionRows`, counted from the part's first row.
        limits_t: As in `AttentionRows`.
        extents_b2: As in `AttentionRows`.
        max_rows: As in `AttentionRows`.
    """

    rows: slice
    holders: Holding | None
    row_starts_b: Tensor
    limits_t: Tensor
    extents_b2: Tensor
    max_rows: int
