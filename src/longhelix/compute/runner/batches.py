"""Builds the batch of each step: the tensors that the model reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.compute.kernels.angles import rotation, rotation_by_axes
from longhelix.compute.models.batch import AttentionRows, Batch, ImageRows, RowRotation, RowSharding, RowView, StepShape
from longhelix.compute.models.image_positions import positions as image_positions
from longhelix.compute.parallel.holders import Holders
from longhelix.compute.parallel.instance_groups import SharedRows
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import takes_images
from longhelix.compute.runner.decode_rows import DecodeRows
from longhelix.compute.runner.local_tokens import find_blocks, first_local, first_seen
from longhelix.compute.runner.row_memory import RowMemory, RowParts, RowTensors
from longhelix.compute.runner.running_sequences import RunningSequences
from longhelix.compute.runner.sequence_state import HOLDERS, SequenceState, by_instances, token_ids
from longhelix.scheduler.step import Chunk, Draft, Step
from longhelix.spec import ModelSpec

_MOST_BATCHES = 16  # of decodes that are cached, because most of a step equals the last one


class _SegmentRows(NamedTuple):
    """Rows of a prompt or a draft that attend on this rank. All int64."""

    positions_3T: NDArray[np.int64]  # one line per axis, or a single line if the prompt has no images
    slots: NDArray[np.int64]
    limits: NDArray[np.int64]
    firsts: tuple[NDArray[np.int64], ...]  # one for each view
    window_slots: tuple[NDArray[np.int64], ...]  # one for each KV group with a limit


class Batches:
    """Builds the batch of each step, and advances its sequences.

    Args:
        image_rows: states_LXH of the rows that images fill in the next step, by sequence id and position in the prompt.
            The layout is that of `ImageRows.states`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        running: RunningSequences,
        image_rows: Mapping[tuple[int, int], Tensor],
    ) -> None:
        self._spec, self._mesh = spec, mesh
        self._kvp_rank = mesh.layout.kvp_rank(mesh.rank)
        self._block_tokens = block_tokens = running.block_tokens
        self._running, self._image_states = running, image_rows
        self._sequences, self._numbers, self._arena = running.by_id, running.numbers, running.arena
        self._device = self._arena.device
        self._takes_images = takes_images(spec, mesh.layout, mesh.rank)
        self._views = spec.views
        pairs = [rotation.size // 2 for rotation in spec.rotations]
        axes = [rotation.rope.axes for rotation in spec.rotations]
        self._axes_R = [torch.tensor(each, dtype=torch.int64, device=self._device) for each in axes]
        self._rows = RowMemory(
            numbers=self._numbers,
            arena=self._arena,
            kvp_rank=self._kvp_rank,
            block_tokens=block_tokens,
            pairs=pairs,
            views=self._views,
        )
        self._decode_batch = lru_cache(_MOST_BATCHES)(self._new_decode_batch)

    def of(self, step: Step) -> Batch:
        """Return the batch of a step: first the rows of decoding sequences, then drafts, then chunks."""
        decoding = self._running.decoding
        groups = self._arena.num_groups
        for at in range(0, len(step.changes.grown), groups):
            blocks = tuple(block for _, block in step.changes.grown[at : at + groups])
            self._sequences[step.changes.grown[at][0]].add_blocks(blocks, self._kvp_rank)
        for seq, record in decoding.records:
            record.add_one(seq.last_token)
        num_local, is_on_all_ranks = self._rows.advance(decoding)
        if step.segments:
            return self._mixed_batch(step, decoding, self._rows.arrays(len(decoding), num_local))
        tensors = self._rows.tensors(len(decoding), num_local)
        kv_mask = b"" if is_on_all_ranks else self._kv_mask(decoding.lines).tobytes()
        self._rotations_at(tensors.rows.positions_b, self._frequencies_of(decoding, (), ()), tensors.rotations)
        batch = self._decode_batch(tensors, kv_mask, step.most_tokens, step.work.parts)
        if not step.turn.instances:
            return batch
        return replace(batch, sharding=RowSharding(batch.sharding.holders, self._shared_rows(step, decoding)))

    def _new_decode_batch(self, tensors: RowTensors, kv_mask: bytes, most_tokens: int, parts: int) -> Batch:
        """Args:
        kv_mask: Bytes of kv_mask_NT: whether each KVP rank keeps KV for each row. Empty if all do for all rows.
        """
        token_ids_B, _, slots_b, limits_b, row_starts_b, extents_b2, firsts, window_slots = tensors.rows
        return Batch(
            token_ids_T=token_ids_B,
            shape=StepShape(len(token_ids_B), most_tokens, parts),
            attention=AttentionRows(
                row_starts_b=row_starts_b,
                limits_t=limits_b,
                extents_b2=extents_b2,
                max_rows=min(len(limits_b), 1),
                rotations=tensors.rotations,
                views=self._views_of(slots_b, firsts, window_slots),
                is_reused=True,
            ),
            sharding=RowSharding(holders=self._holders(np.frombuffer(kv_mask, np.bool_)) if kv_mask else None),
        )

    def _views_of(
        self, slots_t: Tensor, firsts: Sequence[Tensor], window_slots: Sequence[Tensor]
    ) -> tuple[RowView, ...]:
        """What differs by KV group. Without pools of their own, layers with a limit use the pool of the others.

        Args:
            slots_t: of layers without a limit.
            firsts: of each group with a limit.
            window_slots: of each group with a limit, if these have pools of their own.
        """
        slots = window_slots or (slots_t,) * len(firsts)
        blocks_X, *window_blocks = self._arena.blocks
        blocks = window_blocks or (blocks_X,) * len(firsts)
        return (RowView(slots_t, blocks_X), *map(RowView, slots, blocks, firsts))

    def _mixed_batch(self, step: Step, decoding: DecodeRows, decodes: RowParts) -> Batch:
        sequences = [self._sequences[segment.id] for segment in step.segments]
        tokens = [decodes.token_ids_B, *map(_new_tokens, sequences, step.segments)]
        segments = list(map(self._segment_rows, sequences, step.segments))
        lengths = [len(rows.limits) for rows in segments if len(rows.limits)]
        ends = len(decodes.limits_b) + np.cumsum(lengths, dtype=np.int64)
        extents = [self._arena.extents.values[seq.extent.line] for seq in sequences if self._kvp_rank in seq.holders]
        token_ids_T, positions_t, slots_t, limits_t, row_starts_b, bounds_X, *group_tensors = self._on_device(
            tokens,
            [decodes.positions_b, *(rows.positions_3T[0] for rows in segments)],
            [decodes.slots_b, *(rows.slots for rows in segments)],
            [decodes.limits_b, *(rows.limits for rows in segments)],
            [decodes.row_starts_b, ends],
            [decodes.extents_b2.reshape(-1), *extents],
            *map(list, zip(decodes.firsts, *(rows.firsts for rows in segments), strict=True)),
            *map(list, zip(decodes.window_slots, *(rows.window_slots for rows in segments), strict=True)),
        )
        rotations = self._rotations_at(positions_t, self._frequencies_of(decoding, sequences, lengths))
        self._rotate_by_axes(rotations, sequences, segments)
        kv_mask_NS = self._kv_mask(np.append(decoding.lines, [seq.line for seq in sequences]))
        counts = [1] * len(decoding) + [segment.num_tokens for segment in step.segments]
        return Batch(
            token_ids_T=token_ids_T,
            shape=StepShape(len(decoding) + len(sequences), step.most_tokens, step.work.parts),
            attention=AttentionRows(
                row_starts_b=row_starts_b,
                limits_t=limits_t,
                extents_b2=bounds_X.view(-1, 2),
                max_rows=max(lengths, default=min(len(decodes.limits_b), 1)),
                rotations=rotations,
                views=self._views_of(slots_t, group_tensors[: len(self._views)], group_tensors[len(self._views) :]),
            ),
            sharding=RowSharding(
                holders=None if kv_mask_NS.all() else self._holders(kv_mask_NS.repeat(counts, axis=1)),
                shared=self._shared_rows(step, decoding) if step.turn.instances else None,
            ),
            images=self._image_rows(step, len(decoding) + sum(draft.num_tokens for draft in step.drafts)),
        )

    def _rotations_at(
        self, positions_t: Tensor, frequencies: Sequence[Tensor], into: Sequence[RowRotation | None] = ()
    ) -> tuple[RowRotation, ...]:
        """Return how far rows at these positions are rotated, for each rotation. Written to `into`, if not empty."""
        rotations = self._spec.rotations
        return tuple(
            RowRotation(*rotation(positions_t, of_rows, spec.rope.scaling.attention_factor, memory))
            for spec, of_rows, memory in zip(rotations, frequencies, into or (None,) * len(rotations), strict=True)
        )

    def _rotate_by_axes(
        self, rotations: Sequence[RowRotation], sequences: Sequence[SequenceState], segments: Sequence[_SegmentRows]
    ) -> None:
        """Overwrite the rotations of prompts with images, which have a position on each axis.

        Args:
            segments: The last rows that attend here, one item for each of `sequences`.
        """
        start = len(rotations[0].cos_tR) - sum(len(rows.limits) for rows in segments)
        for seq, rows in zip(sequences, segments, strict=True):
            local_rows = slice(start, start + len(rows.limits))
            if seq.new.images and len(rows.limits):
                positions_3T = torch.from_numpy(rows.positions_3T).to(self._device)
                of_rotations = seq.frequencies.of_rotations
                for (rope, _), axes_R, frequencies_R, (cos_tR, sin_tR) in zip(
                    self._spec.rotations, self._axes_R, of_rotations, rotations, strict=True
                ):
                    into = cos_tR[local_rows], sin_tR[local_rows]
                    rotation_by_axes(positions_3T, axes_R, frequencies_R, rope.scaling.attention_factor, into)
            start = local_rows.stop

    def _image_rows(self, step: Step, first: int) -> ImageRows | None:
        """Return the rows of the step that images fill, if this rank's stage takes images.

        The lengths of the sequences must already include this step.

        Args:
            first: The first row of chunks.
        """
        pieces: list[tuple[slice, Tensor]] = []
        for chunk in step.chunks if self._takes_images else ():
            seq = self._sequences[chunk.id]
            start, stop = seq.length - chunk.num_tokens, seq.length
            for image in seq.new.images:
                shown = range(max(image.start, start), min(image.stop, stop))
                if shown:
                    rows = slice(first + shown.start - start, first + shown.stop - start)
                    pieces.append((rows, self._image_states[chunk.id, shown.start]))
            first += chunk.num_tokens
        if not pieces:
            return None
        layers, _, size = pieces[0][1].shape
        mask_T = torch.zeros(first, dtype=torch.bool, device=self._device)
        states_LTH = pieces[0][1].new_zeros(layers, first, size)
        for rows, states_LXH in pieces:
            mask_T[rows] = True
            states_LTH[:, rows] = states_LXH
        return ImageRows(mask_T, states_LTH.unbind())

    def _shared_rows(self, step: Step, decoding: DecodeRows) -> tuple[SharedRows, ...]:
        """Return the rows that other instances compute too."""
        assert self._mesh.instance_groups is not None
        rows = dict[int, range]()
        sequences = [*decoding.sequences, *(self._sequences[segment.id] for segment in step.segments)]
        counts = [1] * len(decoding) + [segment.num_tokens for segment in step.segments]
        for seq, (start, stop) in zip(sequences, pairwise(accumulate(counts, initial=0)), strict=True):
            rows[seq.new.id] = range(start, stop)
        shared: list[SharedRows] = []
        for instances, members in by_instances(sequences):
            rows_S = torch.tensor([row for seq in members for row in rows[seq.new.id]], device=self._device)
            group = self._mesh.instance_groups.of(tuple(sorted(instances)))
            shared.append(SharedRows(group, rows_S))
        return tuple(shared)

    def _on_device(self, *groups: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """Return one tensor for each group of arrays. One copy moves all of them to the device.

        Each tensor begins at a multiple of 16 bytes, because Triton compiles a kernel again for other pointers.
        """
        lengths = [sum(map(len, group)) for group in groups]
        padding = np.zeros(1, np.int64)
        pieces = [[*group, padding] if length % 2 else group for group, length in zip(groups, lengths, strict=True)]
        values_X = torch.from_numpy(np.concatenate([piece for group in pieces for piece in group])).to(self._device)
        tensors = values_X.split([length + length % 2 for length in lengths])
        return tuple(tensor[:length] for tensor, length in zip(tensors, lengths, strict=True))

    def _kv_mask(self, lines_S: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return kv_mask_NS: whether each KVP rank keeps KV for each of the sequences with these lines."""
        return self._numbers.values[lines_S, HOLDERS:].T == 1

    def _holders(self, kv_mask_NT: NDArray[np.bool_]) -> Holders:
        return Holders.of(kv_mask_NT.reshape(self._mesh.layout.kvp, -1), self._kvp_rank, self._device)

    def _frequencies_of(
        self, decoding: DecodeRows, segment_sequences: Sequence[SequenceState], lengths: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Return the frequencies of the rows that attend here, for each rotation.

        Args:
            segment_sequences: The sequences of drafts and chunks.
            lengths: Numbers of rows of those that keep KV here.

        Returns:
            frequencies_tR, or frequencies_R if all rows have the same.
        """
        distinct = decoding.frequencies
        if segment_sequences:
            distinct = distinct.union(seq.frequencies for seq in segment_sequences)
        if len(distinct) == 1:
            return next(iter(distinct)).of_rotations
        local_sequences = [seq for seq in (*decoding.sequences, *segment_sequences) if self._kvp_rank in seq.holders]
        if not local_sequences:  # without rows any will do
            return next(iter(distinct)).of_rotations
        counts = torch.tensor([1] * (len(local_sequences) - len(lengths)) + [*lengths], device=self._device)
        of_rotations = zip(*(seq.frequencies.of_rotations for seq in local_sequences), strict=True)
        return tuple(torch.stack(frequencies).repeat_interleave(counts, dim=0) for frequencies in of_rotations)

    def _segment_rows(self, seq: SequenceState, segment: Draft | Chunk) -> _SegmentRows:
        """Advance a sequence by its segment, and return the rows. There are none if the sequence keeps no KV here."""
        start, stop = seq.length, seq.length + segment.num_tokens
        seq.add_blocks(segment.new_blocks, self._kvp_rank)
        seq.length = stop
        if self._kvp_rank not in seq.holders:
            empty = np.zeros(0, np.int64)
            num_windows = self._arena.num_groups - 1
            return _SegmentRows(
                positions_3T=empty[None],
                slots=empty,
                limits=empty,
                firsts=(empty,) * len(self._views),
                window_slots=(empty,) * num_windows,
            )
        positions = np.arange(start, stop)
        is_local = self._is_local(seq, positions)
        limits = seq.local_length + is_local.cumsum()
        # Local order follows position, so the i-th local token lies in the sequence's local block i // D. A row that
        # writes nothing here may find no block, and takes any.
        local_index = np.maximum(limits - 1, 0)
        ids_GJ = self._arena.ids(seq.extent)
        if not ids_GJ.size:
            ids_GJ = np.zeros((self._arena.num_groups, 1), np.int64)
        ids_Gt = ids_GJ.take(local_index // self._block_tokens, axis=1, mode="clip")
        places_Gt = ids_Gt * self._block_tokens + local_index % self._block_tokens
        slots, *window_slots = np.where(is_local, places_Gt, -1)
        seq.local_length = int(limits[-1])
        by_axes = image_positions(seq.new.images, start, stop) if seq.new.images else positions[None]
        places = self._arena.places(seq.extent)
        firsts = [first_local(places, first_seen(view, positions), self._block_tokens) for view in self._views]
        return _SegmentRows(
            positions_3T=by_axes,
            slots=slots,
            limits=limits,
            firsts=tuple(firsts),
            window_slots=tuple(window_slots),
        )

    def _is_local(self, seq: SequenceState, positions_T: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each of a sequence's positions lies in a block of this rank."""
        return find_blocks(self._arena.places(seq.extent), positions_T // self._block_tokens)[1]


def _new_tokens(seq: SequenceState, segment: Draft | Chunk) -> np.ndarray:
    """Return the tokens of a segment's rows. Marks tokens of a chunk as seen, but not those of a draft."""
    ids = token_ids(segment.token_ids)
    if seq.seen is not None and isinstance(segment, Chunk):
        seq.seen.add(ids)
    return ids
