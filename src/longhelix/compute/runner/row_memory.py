"""The tensors of decode rows: one memory, written by one call in every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.cache.int_table import IntTable
from longhelix.compute.kernels import native
from longhelix.compute.models.batch import RowRotation
from longhelix.compute.runner.decode_rows import DecodeRows
from longhelix.compute.runner.local_tokens import first_local, first_seen
from longhelix.compute.runner.sequence_state import EXTENT, HOLDERS, LAST_OWNER, LAST_TOKEN, LENGTH, LOCAL_LENGTH, SHIFT
from longhelix.spec.attention import Visibility


class RowParts(NamedTuple):
    """Parts of the memory of B decode rows, int64. This rank keeps KV for b of them.

    All are arrays on the host, or all are tensors on the device that runs steps. Fields are as in `models.batch.Batch`.
    """

    token_ids_B: Any
    positions_b: Any
    slots_b: Any
    limits_b: Any
    row_starts_b: Any
    extents_b2: Any
    firsts: tuple[Any, ...]
    window_slots: tuple[Any, ...]

    @classmethod
    def of(cls, memory_X: Any, rows: int, num_local: int, num_views: int, num_windows: int) -> "RowParts":
        """Return the parts of memory_X in the order of `advance`. Each part has room for `rows` rows."""
        tokens, positions, slots, limits, starts, extents = (memory_X[place * rows :] for place in range(6))
        group_starts = (cls.size(rows, before) for before in range(num_views + num_windows))
        group_parts = tuple(memory_X[start : start + num_local] for start in group_starts)
        return cls(
            token_ids_B=tokens[:rows],
            positions_b=positions[:num_local],
            slots_b=slots[:num_local],
            limits_b=limits[:num_local],
            row_starts_b=starts[: num_local + 1],
            extents_b2=extents[1 : 1 + 2 * num_local].reshape(num_local, 2),
            firsts=group_parts[:num_views],
            window_slots=group_parts[num_views:],
        )

    @staticmethod
    def size(rows: int, num_extra: int) -> int:
        """Return the number of integers. num_extra: number of parts for views and for KV groups with a limit."""
        return (7 + num_extra) * rows + 1


@dataclass(frozen=True, eq=False)
class RowTensors:
    """Tensors of a batch of decodes. All steps with the same number of rows have the same objects."""

    rows: RowParts
    rotations: tuple[RowRotation, ...]


class RowMemory:
    """Advances all decoding sequences by a token, and stores the tensors of their rows until the next step.

    Args:
        numbers: Numbers of the sequences.
        arena: Their KV blocks on this rank.
        kvp_rank: This KVP rank.
        block_tokens: Tokens of a KV block.
        pairs: Number of channel pairs R of each rotation.
        views: Which tokens rows see, for each kind of layer with a limit.
    """

    def __init__(
        self,
        numbers: IntTable,
        arena: BlockArena,
        kvp_rank: int,
        block_tokens: int,
        pairs: Sequence[int],
        views: Sequence[Visibility] = (),
    ) -> None:
        self._numbers, self._arena, self._views = numbers, arena, views
        self._limits_V2 = np.array([[view.window_tokens or 0, view.chunk_tokens or 0] for view in views], np.int64)
        self._kvp_rank, self._block_tokens, self._pairs = kvp_rank, block_tokens, pairs
        self._allocate(8)

    @torch.inference_mode()  # like the other tensors of a step, because compiled graphs distinguish them
    def _allocate(self, most_rows: int) -> None:
        self._most_rows, device = most_rows, self._arena.device
        self._host_X = torch.zeros(self._size(most_rows), dtype=torch.int64)
        self._device_X = self._host_X.to(device)
        self._rotations = [torch.zeros(2, most_rows, num_pairs, device=device) for num_pairs in self._pairs]
        self._tensors = lru_cache(64)(self._new_tensors)

    def _size(self, rows: int) -> int:
        return RowParts.size(rows, len(self._views) + self._arena.num_groups - 1)

    def _parts(self, memory_X: Any, rows: int, num_local: int) -> RowParts:
        return RowParts.of(memory_X, rows, num_local, len(self._views), self._arena.num_groups - 1)

    def advance(self, decoding: DecodeRows) -> tuple[int, bool]:
        """Advance every sequence by a token.

        A row sees the local tokens up to its own position, which is the whole causal mask. Its KV goes into the last KV
        block.

        Returns:
            The number of sequences that keep KV here, and whether all KVP ranks keep KV of all sequences.
        """
        if len(decoding) > self._most_rows:
            self._allocate(2 * len(decoding))
        if native.module is None:
            return self._advance(decoding.lines)
        return native.module.advance(
            self._numbers.address,
            self._numbers.values.shape[1],
            decoding.lines_address,
            len(decoding),
            self._arena.extents.address,
            self._arena.ids_address,
            self._arena.num_groups,
            self._arena.group_stride,
            self._arena.places_address,
            self._block_tokens,
            self._kvp_rank,
            self._limits_V2.ctypes.data,
            len(self._views),
            self._host_X.data_ptr(),
        )

    def arrays(self, rows: int, num_local: int) -> RowParts:
        """Return the parts of the last step, on the host."""
        return self._parts(self._host_X.numpy(), rows, num_local)

    def tensors(self, rows: int, num_local: int) -> RowTensors:
        """Return the tensors of the last step, on its device. The caller must write cosines and sines."""
        if self._device_X is not self._host_X:
            size = self._size(rows)
            self._device_X[:size] = self._host_X[:size]
        return self._tensors(rows, num_local)

    def _new_tensors(self, rows: int, num_local: int) -> RowTensors:
        rotations = tuple(RowRotation(*rotation_2TR[:, :num_local]) for rotation_2TR in self._rotations)
        return RowTensors(self._parts(self._device_X, rows, num_local), rotations)

    def _advance(self, lines_B: NDArray[np.int64]) -> tuple[int, bool]:
        """Do the same as csrc/advance.hpp, for installations without native kernels."""
        values = self._numbers.values
        numbers_BC = values[lines_B]
        values[lines_B, LENGTH] += 1
        kv_mask_BN = numbers_BC[:, HOLDERS:] == 1
        is_local_B = kv_mask_BN[:, self._kvp_rank]
        numbers_bC = numbers_BC[is_local_B]
        parts = self.arrays(len(lines_B), len(numbers_bC))
        local_b, writes_b = numbers_bC[:, LOCAL_LENGTH], numbers_bC[:, LAST_OWNER] == self._kvp_rank
        block_b, offset_b = np.divmod(local_b, self._block_tokens)
        parts.token_ids_B[:] = numbers_BC[:, LAST_TOKEN]
        parts.positions_b[:] = numbers_bC[:, LENGTH] + numbers_bC[:, SHIFT]
        parts.limits_b[:] = values[lines_B[is_local_B], LOCAL_LENGTH] = local_b + writes_b
        parts.row_starts_b[:] = np.arange(len(numbers_bC) + 1)
        parts.extents_b2[:] = self._arena.extents.values[numbers_bC[:, EXTENT]]
        # If another rank stores the KV of a row, its place here is arbitrary.
        ids_Gb = self._arena.ids_at(parts.extents_b2[:, 0] + block_b)
        for slots_b, ids_b in zip((parts.slots_b, *parts.window_slots), ids_Gb, strict=True):
            slots_b[:] = np.where(writes_b, ids_b * self._block_tokens + offset_b, -1)
        for view, firsts_b in zip(self._views, parts.firsts, strict=True):
            seen_b = first_seen(view, numbers_bC[:, LENGTH])
            for row, (begin, end) in enumerate(parts.extents_b2.tolist()):
                places = self._arena.places_between(begin, end)
                firsts_b[row] = first_local(places, seen_b[row : row + 1], self._block_tokens)[0]
        return len(numbers_bC), bool(kv_mask_BN.all())
