"""What rows of decodes are made of: one memory, written by one call in every step."""

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
from longhelix.compute.runner.sequence_state import EXTENT, HELD, LAST_OWNER, LAST_TOKEN, LENGTH, LOCAL_LENGTH, SHIFT
from longhelix.spec.attention import Visibility


class RowParts(NamedTuple):
    """Parts of the memory: arrays on the host, or tensors where steps run. int64.

    Of B rows the tokens; of the b sequences among them that keep KV here what `models.batch.Batch` says of rows.
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
    def of(cls, memory_X: Any, rows: int, held: int, num_views: int, num_windows: int) -> "RowParts":
        """As `advance` writes them, each with room for all rows."""
        tokens, positions, slots, limits, starts, extents = (memory_X[place * rows :] for place in range(6))
        more_starts = (cls.size(rows, before) for before in range(num_views + num_windows))
        more = tuple(memory_X[start : start + held] for start in more_starts)
        return cls(
            token_ids_B=tokens[:rows],
            positions_b=positions[:held],
            slots_b=slots[:held],
            limits_b=limits[:held],
            row_starts_b=starts[: held + 1],
            extents_b2=extents[1 : 1 + 2 * held].reshape(held, 2),
            firsts=more[:num_views],
            window_slots=more[num_views:],
        )

    @staticmethod
    def size(rows: int, more: int) -> int:
        """How many integers there are. more: firsts of views, and slots of groups with a limit."""
        return (7 + more) * rows + 1


@dataclass(frozen=True, eq=False)
class RowTensors:
    """What a batch of decodes has where steps run: the same objects in all steps of as many rows."""

    rows: RowParts
    rotations: tuple[RowRotation, ...]


class RowMemory:
    """Lets sequences go on by a token, all at once, and keeps what their rows are made of. The next step writes over
    it.

    Args:
        numbers: those of the sequences.
        arena: their blocks here.
        kvp_rank: this rank.
        block_tokens: tokens of a KV block.
        pairs: R of each rotation.
        views: what rows see in layers with a limit.
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
        self._take(8)

    @torch.inference_mode()  # as what else a step has is made: compiled graphs are for tensors of one kind
    def _take(self, most_rows: int) -> None:
        self._most_rows, device = most_rows, self._arena.device
        self._host_X = torch.zeros(self._size(most_rows), dtype=torch.int64)
        self._device_X = self._host_X.to(device)
        self._rotations = [torch.zeros(2, most_rows, num_pairs, device=device) for num_pairs in self._pairs]
        self._tensors = lru_cache(64)(self._new_tensors)

    def _size(self, rows: int) -> int:
        return RowParts.size(rows, len(self._views) + self._arena.num_groups - 1)

    def _parts(self, memory_X: Any, rows: int, held: int) -> RowParts:
        return RowParts.of(memory_X, rows, held, len(self._views), self._arena.num_groups - 1)

    def advance(self, decoding: DecodeRows) -> tuple[int, bool]:
        """Every sequence goes on by a token. Returns how many of them keep KV here, and whether all KVP ranks keep KV
        of all of them.

        A row sees the local tokens up to its own position; that is the whole causal mask. Its KV goes into the last KV
        block.
        """
        if len(decoding) > self._most_rows:
            self._take(2 * len(decoding))
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

    def arrays(self, rows: int, held: int) -> RowParts:
        """Of the last step, on the host."""
        return self._parts(self._host_X.numpy(), rows, held)

    def tensors(self, rows: int, held: int) -> RowTensors:
        """Of the last step, where it runs; cosines and sines are not written yet."""
        if self._device_X is not self._host_X:
            size = self._size(rows)
            self._device_X[:size] = self._host_X[:size]
        return self._tensors(rows, held)

    def _new_tensors(self, rows: int, held: int) -> RowTensors:
        rotations = tuple(RowRotation(*rotation_2TR[:, :held]) for rotation_2TR in self._rotations)
        return RowTensors(self._parts(self._device_X, rows, held), rotations)

    def _advance(self, lines_B: NDArray[np.int64]) -> tuple[int, bool]:
        """As csrc/advance.hpp, where that was not built."""
        values = self._numbers.values
        now_BC = values[lines_B]
        values[lines_B, LENGTH] += 1
        held_BN = now_BC[:, HELD:] == 1
        held_B = held_BN[:, self._kvp_rank]
        now_bC = now_BC[held_B]
        parts = self.arrays(len(lines_B), len(now_bC))
        local_b, mine_b = now_bC[:, LOCAL_LENGTH], now_bC[:, LAST_OWNER] == self._kvp_rank
        block_b, offset_b = np.divmod(local_b, self._block_tokens)
        parts.token_ids_B[:] = now_BC[:, LAST_TOKEN]
        parts.positions_b[:] = now_bC[:, LENGTH] + now_bC[:, SHIFT]
        parts.limits_b[:] = values[lines_B[held_B], LOCAL_LENGTH] = local_b + mine_b
        parts.row_starts_b[:] = np.arange(len(now_bC) + 1)
        parts.extents_b2[:] = self._arena.extents.values[now_bC[:, EXTENT]]
        # Of rows whose KV goes elsewhere the place may be anything.
        ids_Gb = self._arena.ids_at(parts.extents_b2[:, 0] + block_b)
        for slots_b, ids_b in zip((parts.slots_b, *parts.window_slots), ids_Gb, strict=True):
            slots_b[:] = np.where(mine_b, ids_b * self._block_tokens + offset_b, -1)
        for view, firsts_b in zip(self._views, parts.firsts, strict=True):
            seen_b = first_seen(view, now_bC[:, LENGTH])
            for row, (begin, end) in enumerate(parts.extents_b2.tolist()):
                places = self._arena.places_between(begin, end)
                firsts_b[row] = first_local(places, seen_b[row : row + 1], self._block_tokens)[0]
        return len(now_bC), bool(held_BN.all())
