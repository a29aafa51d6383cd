"""The packed rows of one step, as the model sees them on this rank."""

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
    """What images do to hidden states. mask_T (bool): the rows that they fill. states: their embeddings there, then
    what is added to all rows after each of the first layers; states_TH each, zero where no image is."""

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
        return hidden_TH + (added_TH if shards is None else shards.own(added_TH))


class RowRotation(NamedTuple):
    """How far rows are rotated. R pairs of channels, float32."""

    cos_tR: Tensor
    sin_tR: Tensor


class RowView(NamedTuple):
    """What differs in layers whose rows see only some tokens.

    Attributes:
        firsts_t: the first local token that each row sees.
        slots_t: as `Batch.slots_t`, in the pool of these layers.
        blocks_X: as `Batch.blocks_X`, in the pool of these layers.
    """

    firsts_t: Tensor
    slots_t: Tensor
    blocks_X: Tensor


@dataclass(frozen=True)
class Batch:
    """T rows, one sequence after the other. Attention takes t of them: those of the b sequences that keep KV on this
    rank. All integers are int64.

    Attributes:
        token_ids_T: The token of each row.
        holders: Which ranks have which rows. None: all ranks have all rows.
        rotations: How far each row is rotated, for each of `ModelSpec.rotations`.
        slots_t: Where the KV of a row goes in this rank's pool. -1: another rank owns it.
        limits_t: The local token of its request after the last one that a row sees.
        row_starts_b: (b + 1) first rows.
        blocks_X: Local KV blocks of all live sequences.
        extents_b2: Where those of each of the b sequences begin and end there.
        max_rows: The most rows of one of the b sequences.
        num_sequences: Sequences of all T rows.
        most_tokens: The step's.
        parts: The step's.
        padding_T: Which rows stand for none. bool. None: all are rows of sequences.
        shared: Where KVP instances have clocks of their own, the rows that others have as well. None: all ranks have
            all rows, and exchange those that `holders` says.
        images: The rows that images fill, on ranks of stages that take these. None: there are none.
        stays: Later steps with as many rows have the same tensors, and write over what is in them.
        shards: Hidden states are token shards between products. None: all ranks have all rows of them.
        pass_shards: A compiler pass makes them such shards: layers have what it needs to see, norms as ops of their
            own, and experts with token shards.
        views: What differs in layers whose rows see only some tokens, by view (`ModelSpec.views`).
    """

    token_ids_T: Tensor
    holders: Holding | None
    rotations: tuple[RowRotation, ...]
    slots_t: Tensor
    limits_t: Tensor
    row_starts_b: Tensor
    blocks_X: Tensor
    extents_b2: Tensor
    max_rows: int
    num_sequences: int
    most_tokens: int
    parts: int = 1
    padding_T: Tensor | None = None
    shared: tuple[SharedRows, ...] | None = None
    images: ImageRows | None = None
    stays: bool = False
    shards: TokenShards | None = None
    pass_shards: TokenShards | None = None
    views: tuple[RowView, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether its layers run op by op, because hardly another step is like it: it has rows of images, or rows that
        others have as well."""
        return bool(self.shared) or self.images is not None

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one row."""
        return self.num_sequences == len(self.token_ids_T)

    def own_rows(self, hidden_TH: Tensor) -> Tensor:
        """hidden_tH: the rows whose queries, keys and values this rank computes."""
        return hidden_TH if self.holders is None else take_rows(hidden_TH, self.holders.rows_t)

    def firsts_of(self, view: int | None) -> Tensor | None:
        """The first local token that each row sees in layers of a view. None: token 0."""
        return None if view is None else self.views[view].firsts_t

    def slots_of(self, view: int | None) -> Tensor:
        """Where the KV of a row goes in layers of a view."""
        return self.slots_t if view is None else self.views[view].slots_t

    def blocks_of(self, view: int | None) -> Tensor:
        """Local KV blocks of all live sequences in layers of a view."""
        return self.blocks_X if view is None else self.views[view].blocks_X

    def cut(self) -> "list[Attended]":
        """The parts that attend one after the other: `parts` ranges of all T rows, as even as can be, the same on every
        rank."""
        if self.holders is None:
            ranges = split(len(self.token_ids_T), self.parts)
            return [self._attended(slice(part.start, part.stop), None) for part in ranges]
        return [self._attended(rows, holders) for rows, holders in self.holders.cut(self.parts)]

    def _attended(self, rows: slice, holders: Holding | None) -> "Attended":
        if self.max_rows <= 1:
            starts_b = self.row_starts_b[rows.start : rows.stop + 1] - rows.start
            return Attended(rows, holders, self.extents_b2[rows], starts_b, self.limits_t[rows], 1)
        # Sequences that lie outside of the run have no rows in it.
        starts_b = self.row_starts_b.clamp(rows.start, rows.stop) - rows.start
        max_rows = min(self.max_rows, rows.stop - rows.start)
        return Attended(rows, holders, self.extents_b2, starts_b, self.limits_t[rows], max_rows)


@dataclass(frozen=True)
class Attended:
    """The rows of one part of a batch, as attention takes them."""

    rows: slice
    holders: Holding | None
    extents_b2: Tensor
    row_starts_b: Tensor
    limits_t: Tensor
    max_rows: int
