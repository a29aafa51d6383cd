"""The KV block ids of live sequences as the kernels read them: kept from step to step, so that no step copies them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(eq=False)
class Extent:
    """Where a sequence's ids begin and end in the arena, and how many there may be."""

    begin: int
    end: int
    room: int


class BlockArena:
    """One run of memory that never moves, `blocks_X`, with an extent of ids for each sequence, in position order.

    Extents are opened one behind the other, with room for all that their sequences may ever need; at the end of the
    memory those that live move together. Together they have at most `num_ids` ids, and the memory has room for twice
    as many: between two moves as many are opened as a move can move, so that an id costs the same however many there
    are. Steps are prepared on the host and run on `device`: where that is a GPU, it has a copy.
    """

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self._host_X = torch.zeros(2 * num_ids, dtype=torch.int64)
        self.blocks_X = self._host_X.to(device)
        self._ids: NDArray[np.int64] = self._host_X.numpy()
        self._live: dict[Extent, None] = {}
        self._tail = 0

    def open(self, room: int) -> Extent:
        """An extent for a new sequence."""
        if self._tail + room > len(self._ids):
            self._compact()
        extent = Extent(self._tail, self._tail, room)
        self._tail += room
        assert self._tail <= len(self._ids)
        self._live[extent] = None
        return extent

    def close(self, extent: Extent) -> None:
        """Forget a sequence that has ended."""
        del self._live[extent]

    def append(self, extent: Extent, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Add block ids at the end of an extent."""
        if not len(ids):
            return
        start, extent.end = extent.end, extent.end + len(ids)
        assert extent.end - extent.begin <= extent.room
        self._ids[start : extent.end] = ids
        self._publish(start, extent.end)

    def ids(self, extent: Extent) -> NDArray[np.int64]:
        """A sequence's block ids, on the host."""
        return self._ids[extent.begin : extent.end]

    def id(self, extent: Extent, index: int) -> int:
        """One of a sequence's block ids."""
        return int(self._ids[extent.begin + index])

    def _compact(self) -> None:
        self._tail = 0
        for extent in self._live:
            ids = self.ids(extent)
            extent.begin, extent.end = self._tail, self._tail + len(ids)
            self.ids(extent)[:] = ids
            self._tail += extent.room
        self._publish(0, self._tail)

    def _publish(self, start: int, stop: int) -> None:
        if self.blocks_X is not self._host_X:
            self.blocks_X[start:stop] = self._host_X[start:stop]
