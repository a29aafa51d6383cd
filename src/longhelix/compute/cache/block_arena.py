"""The KV block ids of live sequences as the kernels read them: kept from step to step, so that no step copies them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longhelix.compute.cache.int_table import IntTable


@dataclass(eq=False)
class Extent:
    """Where a sequence's ids are in the arena: its line says where they begin and end, `room` how many there may be."""

    line: int
    room: int


class BlockArena:
    """One run of memory that never moves, with an extent of ids for each sequence, in position order; `extents` says
    where each begins and ends. The arena also keeps each block's *place*: its index among all blocks of the sequence,
    those of other KVP ranks included.

    A block has an id in each of `num_groups` KV groups: `blocks[g]`, blocks_X, has those of group g. Of a block that
    no row sees any longer it may be anything.

    Extents are opened one behind the other, with room for all that their sequences may ever need; at the end of the
    memory those that live move together. Together they have at most `num_ids` ids, and the memory has room for twice
    as many: between two moves as many are opened as a move can move, so that an id costs the same however many there
    are. Steps are prepared on the host and run on `device`: where that is a GPU, it has a copy.
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
        """An extent for a new sequence."""
        if self._tail + room > self.group_stride:
            self._compact()
        extent = Extent(self.extents.take(), room)
        self.extents.values[extent.line] = self._tail
        self._tail += room
        assert self._tail <= self.group_stride
        self._live[extent] = None
        return extent

    def close(self, extent: Extent) -> None:
        """Forget a sequence that has ended."""
        del self._live[extent]
        self.extents.give_back(extent.line)

    def append(
        self,
        extent: Extent,
        ids_GJ: Sequence[Sequence[int]] | NDArray[np.int64],
        places: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Add block ids, by group, and the places of the blocks at the end of an extent."""
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
        """A sequence's block ids by group, ids_GJ, on the host."""
        begin, end = self.extents.values[extent.line].tolist()
        return self._ids[:, begin:end]

    def num_blocks(self, extent: Extent) -> int:
        """How many blocks a sequence has here."""
        begin, end = self.extents.values[extent.line].tolist()
        return end - begin

    def places(self, extent: Extent) -> NDArray[np.int64]:
        """The places of a sequence's blocks, which ascend."""
        return self.places_between(*self.extents.values[extent.line].tolist())

    def places_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """The places of the blocks in a part of the memory."""
        return self._places[begin:end]

    def ids_at(self, places_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids by group at these places of the memory; at a place outside of it, any."""
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
