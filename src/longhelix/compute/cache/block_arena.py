"""The KV block ids of live sequences as the kernels read them: kept from step to step, so that no step copies them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longhelix.compute.cache.lines import Lines


@dataclass(eq=False)
class Extent:
    """Where a sequence's ids are in the arena: its line says where they begin and end, `room` how many there may be."""

    line: int
    room: int


class BlockArena:
    """One run of memory that never moves, `blocks_X`, with an extent of ids for each sequence, in position order;
    `extents` says where each begins and ends. The arena also keeps each block's *place*: its index among all blocks of
    the sequence, those of other KVP ranks included.

    Extents are opened one behind the other, with room for all that their sequences may ever need; at the end of the
    memory those that live move together. Together they have at most `num_ids` ids, and the memory has room for twice
    as many: between two moves as many are opened as a move can move, so that an id costs the same however many there
    are. Steps are prepared on the host and run on `device`: where that is a GPU, it has a copy.
    """

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self._host_X = torch.zeros(2 * num_ids, dtype=torch.int64)
        self.blocks_X = self._host_X.to(device)
        self._ids: NDArray[np.int64] = self._host_X.numpy()
        self.ids_address = self._host_X.data_ptr()
        self._places: NDArray[np.int64] = np.zeros(2 * num_ids, np.int64)
        self.places_address = self._places.ctypes.data
        self.extents = Lines(2)
        self._live: dict[Extent, None] = {}
        self._tail = 0

    def open(self, room: int) -> Extent:
        """An extent for a new sequence."""
        if self._tail + room > len(self._ids):
            self._compact()
        extent = Extent(self.extents.take(), room)
        self.extents.values[extent.line] = self._tail
        self._tail += room
        assert self._tail <= len(self._ids)
        self._live[extent] = None
        return extent

    def close(self, extent: Extent) -> None:
        """Forget a sequence that has ended."""
        del self._live[extent]
        self.extents.give_back(extent.line)

    def append(
        self, extent: Extent, ids: Sequence[int] | NDArray[np.int64], places: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """Add block ids, and their places, at the end of an extent."""
        if not len(ids):
            return
        begin, start = self.extents.values[extent.line].tolist()
        end = start + len(ids)
        assert end - begin <= extent.room
        self.extents.values[extent.line, 1] = end
        self._ids[start:end] = ids
        self._places[start:end] = places
        self._publish(start, end)

    def ids(self, extent: Extent) -> NDArray[np.int64]:
        """A sequence's block ids, on the host."""
        begin, end = self.extents.values[extent.line].tolist()
        return self._ids[begin:end]

    def places(self, extent: Extent) -> NDArray[np.int64]:
        """The places of a sequence's blocks, which ascend."""
        return self.places_between(*self.extents.values[extent.line].tolist())

    def places_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """The places of the blocks in a part of the memory."""
        return self._places[begin:end]

    def ids_at(self, places_b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at these places of the memory; at a place outside of it, any."""
        return self._ids.take(places_b, mode="clip")

    def _compact(self) -> None:
        self._tail = 0
        for extent in self._live:
            ids, places = self.ids(extent), self.places(extent)
            self.extents.values[extent.line] = self._tail, self._tail + len(ids)
            self.ids(extent)[:] = ids
            self.places(extent)[:] = places
            self._tail += extent.room
        self._publish(0, self._tail)

    def _publish(self, start: int, stop: int) -> None:
        if self.blocks_X is not self._host_X:
            self.blocks_X[start:stop] = self._host_X[start:stop]
