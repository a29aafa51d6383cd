"""The KV block ids of live sequences, in memory that kernels read. Steps only write what changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longhelix.compute.cache.int_table import IntTable


@dataclass(eq=False)
class Extent:
    """The part of the arena with a sequence's ids."""

    line: int  # of `BlockArena.extents`, with the begin and end of the part
    room: int  # maximum number of ids


class BlockArena:
    """The KV block ids of all sequences, in one contiguous memory that never moves.

    Each sequence has an extent with the ids of its blocks, in position order, and with each block's *place*: its index
    among all blocks of the sequence, including those of other KVP ranks. A block has an id in each KV group. If no row
    sees the block any longer, its id is arbitrary.

    A new extent begins after the last one, and has room for all blocks that its sequence may ever need. When the memory
    ends, live extents move together. Live extents have at most `num_ids` ids, and the memory has twice the room, so the
    cost of moves per id is constant. The host writes the memory. A GPU has a copy.

    Attributes:
        blocks: Ids of each KV group, blocks_X. int64, on the device.
        extents: Begin and end of each extent.
    """

    def __init__(self, num_ids: int, device: torch.device, num_groups: int = 1) -> None:
        self._host_GX = torch.zeros(num_groups, 2 * num_ids, dtype=torch.int64)
        self._device_GX = self._host_GX.to(device)
        self.num_groups = num_groups
        self.blocks = self._device_GX.unbind()
        self.device = device
        self._ids: NDArray[np.int64] = self._host_GX.numpy()
        self.ids_address = self._host_GX.data_ptr()
        self.group_stride = 2 * num_ids
        self._places: NDArray[np.int64] = np.zeros(2 * num_ids, np.int64)
        self.places_address = self._places.ctypes.data
        self.extents = IntTable(2)
        self._live: dict[Extent, None] = {}
        self._tail = 0

    def open(self, room: int) -> Extent:
        """Return an extent for a new sequence."""
        if self._tail + room > self.group_stride:
            self._compact()
        extent = Extent(self.extents.take(), room)
        self.extents.values[extent.line] = self._tail
        self._tail += room
        assert self._tail <= self.group_stride
        self._live[extent] = None
        return extent

    def close(self, extent: Extent) -> None:
        """Free the extent of a sequence that has ended."""
        del self._live[extent]
        self.extents.give_back(extent.line)

    def append(
        self,
        extent: Extent,
        ids_GJ: Sequence[Sequence[int]] | NDArray[np.int64],
        places: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Append blocks to an extent. ids_GJ: ids by KV group. places: places of the blocks."""
        if not len(places):
            return
        begin, start = self.extents.values[extent.line].tolist()
        end = start + len(places)
        assert end - begin <= extent.room
        self.extents.values[extent.line, 1] = end
        self._ids[:, start:end] = ids_GJ
        self._places[start:end] = places
        self._publish(start, end)

    def cut(self, extent: Extent, count: int) -> None:
        """Keep the first `count` blocks of an extent."""
        self.extents.values[extent.line, 1] = self.extents.values[extent.line, 0] + count

    def ids(self, extent: Extent) -> NDArray[np.int64]:
        """Return a sequence's block ids by KV group, ids_GJ, on the host."""
        begin, end = self.extents.values[extent.line].tolist()
        return self._ids[:, begin:end]

    def num_blocks(self, extent: Extent) -> int:
        """Return the number of a sequence's blocks on this rank."""
        begin, end = self.extents.values[extent.line].tolist()
        return end - begin

    def places(self, extent: Extent) -> NDArray[np.int64]:
        """Return the places of a sequence's blocks, in ascending order."""
        return self.places_between(*self.extents.values[extent.line].tolist())

    def places_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the places of the blocks in a part of the memory."""
        return self._places[begin:end]

    def ids_at(self, places_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ids_Gb: the ids by KV group at these indices of the memory. Indices outside give arbitrary ids."""
        return self._ids.take(places_b, axis=1, mode="clip")

    def _compact(self) -> None:
        self._tail = 0
        for extent in self._live:
            ids_GJ, places = self.ids(extent), self.places(extent)
            self.extents.values[extent.line] = self._tail, self._tail + len(places)
            self.ids(extent)[:] = ids_GJ
            self.places(extent)[:] = places
            self._tail += extent.room
        self._publish(0, self._tail)

    def _publish(self, start: int, stop: int) -> None:
        if self._device_GX is not self._host_GX:
            self._device_GX[:, start:stop] = self._host_GX[:, start:stop]
