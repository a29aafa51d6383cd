"""The KV blocks of live sequences as the kernels read them: kept from step to step, so that no step copies them."""

import numpy as np
import torch
from torch import Tensor


class BlockTable:
    """A row of block ids for each live sequence, in position order; grows with the sequences and their lengths.

    Steps are prepared on the host and run on `device`: where that is a GPU, it has a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._host_BJ = torch.zeros(1, 64, dtype=torch.int64)
        self._device_BJ = self._host_BJ.to(device)
        self._gathered_BJ = torch.empty_like(self._device_BJ)
        self._free = [0]
        self._lengths = [0]

    def open(self) -> int:
        """A row for a new sequence."""
        if not self._free:
            num_rows, width = self._host_BJ.shape
            self._resize(2 * num_rows, width)
            self._free += range(2 * num_rows - 1, num_rows - 1, -1)
            self._lengths += [0] * num_rows
        row = self._free.pop()
        self._lengths[row] = 0
        return row

    def close(self, row: int) -> None:
        """Give back the row of a sequence that has ended."""
        self._free.append(row)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Add block ids at the end of a row."""
        if not block_ids:
            return
        start, stop = self._lengths[row], self._lengths[row] + len(block_ids)
        num_rows, width = self._host_BJ.shape
        if stop > width:
            self._resize(num_rows, max(2 * width, stop))
        self._host_BJ[row, start:stop] = torch.tensor(block_ids, dtype=torch.int64)
        if self._device_BJ is not self._host_BJ:
            self._device_BJ[row, start:stop] = self._host_BJ[row, start:stop]
        self._lengths[row] = stop

    def blocks(self, row: int) -> np.ndarray:
        """A row's block ids, on the host."""
        return self._host_BJ[row, : self._lengths[row]].numpy()

    def rows(self, rows: list[int]) -> Tensor:
        """blocks_BJ of a step, at the same address from step to step: the rows, or where they do not lie side by side a
        copy that the next call overwrites."""
        first, count = rows[0] if rows else 0, len(rows)
        if rows == list(range(first, first + count)):
            return self._device_BJ[first : first + count]
        indices = torch.tensor(rows, device=self._device_BJ.device)
        return torch.index_select(self._device_BJ, 0, indices, out=self._gathered_BJ[:count])

    def _resize(self, num_rows: int, width: int) -> None:
        grown_BJ = self._host_BJ.new_zeros(num_rows, width)
        grown_BJ[: self._host_BJ.shape[0], : self._host_BJ.shape[1]] = self._host_BJ
        self._host_BJ, self._device_BJ = grown_BJ, grown_BJ.to(self._device_BJ.device)
        self._gathered_BJ = torch.empty_like(self._device_BJ)
