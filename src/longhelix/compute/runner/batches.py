"""What the model takes in each step."""

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
from longhelix.compute.runner.sequence_state import HELD, SequenceState, by_instances, token_ids
from longhelix.scheduler.step import Chunk, Draft, Step
from longhelix.spec import ModelSpec

_MOST_BATCHES = 16  # of decodes that are kept: little of a step differs from the last one's


class _SegmentRows(NamedTuple):
    """Rows of a prompt, or of a draft, that attend here. int64. positions_3T: by axis, or without images in the prompt
    those of one. firsts: by view. window_slots: by KV group with a limit."""

    positions_3T: NDArray[np.int64]
    slots: NDArray[np.int64]
    limits: NDArray[np.int64]
    firsts: tuple[NDArray[np.int64], ...]
    window_slots: tuple[NDArray[np.int64], ...]


class Batches:
    """Makes a batch of each step, and advances its sequences.

    image_rows: by sequence and place in its prompt, states_LXH: rows that an image fills in the step that comes, as the
    states of `ImageRows` have them.
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
        self._running, self._given_rows = running, image_rows
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
        """The rows of a step: those of the sequences that decode in it, then its drafts and chunks."""
        decoding = self._running.decoding
        groups = self._arena.num_groups
        for at in range(0, len(step.changes.grown), groups):
            blocks = tuple(block for _, block in step.changes.grown[at : at + groups])
            self._sequences[step.changes.grown[at][0]].add_blocks(blocks, self._kvp_rank)
        for seq, record in decoding.records:
            record.add_one(seq.last_token)
        num_held, everywhere = self._rows.advance(decoding)
        if step.segments:
            return self._mixed_batch(step, decoding, self._rows.arrays(len(decoding), num_held))
        tensors = self._rows.tensors(len(decoding), num_held)
        held = b"" if everywhere else self._held(decoding.lines).tobytes()
        self._turn(tensors.rows.positions_b, self._frequencies_of(decoding, (), ()), tensors.rotations)
        batch = self._decode_batch(tensors, held, step.most_tokens, step.work.parts)
        if not step.turn.instances:
            return batch
        return replace(batch, sharding=RowSharding(batch.sharding.holders, self._shared(step, decoding)))

    def _new_decode_batch(self, tensors: RowTensors, held: bytes, most_tokens: int, parts: int) -> Batch:
        """held: which KVP ranks hold KV for which row; empty if all do for all rows."""
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
                stays=True,
            ),
            sharding=RowSharding(holders=self._holders(np.frombuffer(held, np.bool_)) if held else None),
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
        lengths = [len(some.limits) for some in segments if len(some.limits)]
        ends = len(decodes.limits_b) + np.cumsum(lengths, dtype=np.int64)
        extents = [self._arena.extents.values[seq.extent.line] for seq in sequences if self._kvp_rank in seq.holders]
        token_ids_T, positions_t, slots_t, limits_t, row_starts_b, bounds_X, *more = self._on_device(
            tokens,
            [decodes.positions_b, *(some.positions_3T[0] for some in segments)],
            [decodes.slots_b, *(some.slots for some in segments)],
            [decodes.limits_b, *(some.limits for some in segments)],
            [decodes.row_starts_b, ends],
            [decodes.extents_b2.reshape(-1), *extents],
            *map(list, zip(decodes.firsts, *(some.firsts for some in segments), strict=True)),
            *map(list, zip(decodes.window_slots, *(some.window_slots for some in segments), strict=True)),
        )
        rotations = self._turn(positions_t, self._frequencies_of(decoding, sequences, lengths))
        self._turn_by_axes(rotations, sequences, segments)
        held_NS = self._held(np.append(decoding.lines, [seq.line for seq in sequences]))
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
                views=self._views_of(slots_t, more[: len(self._views)], more[len(self._views) :]),
            ),
            sharding=RowSharding(
                holders=None if held_NS.all() else self._holders(held_NS.repeat(counts, axis=1)),
                shared=self._shared(step, decoding) if step.turn.instances else None,
            ),
            images=self._image_rows(step, len(decoding) + sum(draft.num_tokens for draft in step.drafts)),
        )

    def _turn(
        self, positions_t: Tensor, frequencies: Sequence[Tensor], into: Sequence[RowRotation | None] = ()
    ) -> tuple[RowRotation, ...]:
        """How far rows at these positions are rotated, by rotation. into: where it is written, if not to new memory."""
        rotations = self._spec.rotations
        return tuple(
            RowRotation(*rotation(positions_t, of_rows, each.rope.attention_factor, own))
            for each, of_rows, own in zip(rotations, frequencies, into or (None,) * len(rotations), strict=True)
        )

    def _turn_by_axes(
        self, rotations: Sequence[RowRotation], sequences: Sequence[SequenceState], segments: Sequence[_SegmentRows]
    ) -> None:
        """Rotate the rows of prompts with images, by their positions on each axis. segments: the last of all rows that
        attend here."""
        start = len(rotations[0].cos_tR) - sum(len(rows.limits) for rows in segments)
        for seq, rows in zip(sequences, segments, strict=True):
            own = slice(start, start + len(rows.limits))
            if seq.new.images and len(rows.limits):
                positions_3T = torch.from_numpy(rows.positions_3T).to(self._device)
                of_rotations = seq.frequencies.of_rotations
                for (rope, _), axes_R, frequencies_R, (cos_tR, sin_tR) in zip(
                    self._spec.rotations, self._axes_R, of_rotations, rotations, strict=True
                ):
                    into = cos_tR[own], sin_tR[own]
                    rotation_by_axes(positions_3T, axes_R, frequencies_R, rope.attention_factor, into)
            start = own.stop

    def _image_rows(self, step: Step, first: int) -> ImageRows | None:
        """The rows of the step that images fill, where this rank's stage takes images. first: the first row of
        chunks. Before the step's layers run, the sequences' lengths are those after it."""
        found: list[tuple[slice, Tensor]] = []
        for chunk in step.chunks if self._takes_images else ():
            seq = self._sequences[chunk.id]
            start, stop = seq.length - chunk.num_tokens, seq.length
            for image in seq.new.images:
                own = range(max(image.start, start), min(image.stop, stop))
                if own:
                    rows = slice(first + own.start - start, first + own.stop - start)
                    found.append((rows, self._given_rows[chunk.id, own.start]))
            first += chunk.num_tokens
        if not found:
            return None
        layers, _, size = found[0][1].shape
        mask_T = torch.zeros(first, dtype=torch.bool, device=self._device)
        states_LTH = found[0][1].new_zeros(layers, first, size)
        for rows, states_LXH in found:
            mask_T[rows] = True
            states_LTH[:, rows] = states_LXH
        return ImageRows(mask_T, states_LTH.unbind())

    def _shared(self, step: Step, decoding: DecodeRows) -> tuple[SharedRows, ...]:
        """The rows that other instances have as well."""
        assert self._mesh.instance_groups is not None
        rows = dict[int, range]()
        sequences = [*decoding.sequences, *(self._sequences[segment.id] for segment in step.segments)]
        counts = [1] * len(decoding) + [segment.num_tokens for segment in step.segments]
        for seq, (start, stop) in zip(sequences, pairwise(accumulate(counts, initial=0)), strict=True):
            rows[seq.new.id] = range(start, stop)
        found: list[SharedRows] = []
        for instances, together in by_instances(sequences):
            rows_S = torch.tensor([row for seq in together for row in rows[seq.new.id]], device=self._device)
            group = self._mesh.instance_groups.of(tuple(sorted(instances)))
            found.append(SharedRows(group, rows_S))
        return tuple(found)

    def _on_device(self, *groups: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """Integers as tensors, each of a group's pieces. They are copied there at once.

        Each tensor begins at a multiple of 16 bytes: Triton compiles a kernel once more for pointers that do not.
        """
        lengths = [sum(map(len, group)) for group in groups]
        odd = np.zeros(1, np.int64)
        pieces = [[*group, odd] if length % 2 else group for group, length in zip(groups, lengths, strict=True)]
        together_X = torch.from_numpy(np.concatenate([piece for group in pieces for piece in group])).to(self._device)
        placed = together_X.split([length + length % 2 for length in lengths])
        return tuple(tensor[:length] for tensor, length in zip(placed, lengths, strict=True))

    def _held(self, lines_S: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which KVP ranks hold KV for which sequences, by their lines."""
        return self._numbers.values[lines_S, HELD:].T == 1

    def _holders(self, held_NT: NDArray[np.bool_]) -> Holders:
        return Holders.of(held_NT.reshape(self._mesh.layout.kvp, -1), self._kvp_rank, self._device)

    def _frequencies_of(
        self, decoding: DecodeRows, others: Sequence[SequenceState], lengths: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Those of the rows that attend here, by rotation: frequencies_tR, or frequencies_R where all have the same.

        others: the sequences with any number of rows. lengths: of those that keep KV here the rows.
        """
        different = decoding.frequencies
        if others:
            different = different.union(seq.frequencies for seq in others)
        if len(different) == 1:
            return next(iter(different)).of_rotations
        held = [seq for seq in (*decoding.sequences, *others) if self._kvp_rank in seq.holders]
        if not held:  # without rows any will do
            return next(iter(different)).of_rotations
        counts = torch.tensor([1] * (len(held) - len(lengths)) + [*lengths], device=self._device)
        of_rotations = zip(*(seq.frequencies.of_rotations for seq in held), strict=True)
        return tuple(torch.stack(same).repeat_interleave(counts, dim=0) for same in of_rotations)

    def _segment_rows(self, seq: SequenceState, segment: Draft | Chunk) -> _SegmentRows:
        """The next rows of a prompt or of a draft, which see and are stored as decodes. None if the sequence keeps no
        KV here."""
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
        mine = self._own(seq, positions)
        limits = seq.local_length + mine.cumsum()
        # Local order follows position, so the i-th local token lies in the sequence's local block i // D. A row that
        # writes nothing here may find no block, and takes any.
        local_index = np.maximum(limits - 1, 0)
        ids_GJ = self._arena.ids(seq.extent)
        if not ids_GJ.size:
            ids_GJ = np.zeros((self._arena.num_groups, 1), np.int64)
        ids_Gt = ids_GJ.take(local_index // self._block_tokens, axis=1, mode="clip")
        places_Gt = ids_Gt * self._block_tokens + local_index % self._block_tokens
        slots, *window_slots = np.where(mine, places_Gt, -1)
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

    def _own(self, seq: SequenceState, positions_T: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of a sequence's positions lie in blocks of this rank."""
        return find_blocks(self._arena.places(seq.extent), positions_T // self._block_tokens)[1]


def _new_tokens(seq: SequenceState, segment: Draft | Chunk) -> np.ndarray:
    """The tokens of a segment's rows. Those of a chunk count as seen from here on; those of a draft may be rejected."""
    ids = token_ids(segment.token_ids)
    if seq.seen is not None and isinstance(segment, Chunk):
        seq.seen.add(ids)
    return ids
