"""The KV blocks of live sequences as the kernels read them: kept from step to step, so that no step copies them."""

import torch
from torch import Tensor


class BlockTable:
    """A row of block ids for each live sequence, in position order; grows with the sequences and their lengths."""

    def __init__(self, device: torch.device) -> None:
        self._blocks_BJ = torch.zeros(1, 64, dtype=torch.int64, device=device)
        self._free = [0]
        self._lengths = [0]

    def open(self) -> int:
        """A row for a new sequence."""
        if not self._free:
            num_rows, width = self._blocks_BJ.shape
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
        num_rows, width = self._blocks_BJ.shape
        if stop > width:
            self._resize(num_rows, max(2 * width, stop))
        self._blocks_BJ[row, start:stop] = torch.tensor(block_ids, dtype=torch.int64)
        self._lengths[row] = stop

    def __getitem__(self, place: tuple[int, slice]) -> Tensor:
        """Some of a row's block ids."""
        row, columns = place
        return self._blocks_BJ[row, : self._lengths[row]][columns]

    def rows(self, rows: list[int]) -> Tensor:
        """blocks_BJ of a step: where its rows lie side by side, a view that stays the same from step to step."""
        first, count = rows[0], len(rows)
        if rows == list(range(first, first + count)):
            return self._blocks_BJ[first : first + count]
        return self._blocks_BJ[rows, : max(self._lengths[row] for row in rows)]

    def _resize(self, num_rows: int, width: int) -> None:
        grown_BJ = self._blocks_BJ.new_zeros(num_rows, width)
        grown_BJ[: self._blocks_BJ.shape[0], : self._blocks_BJ.shape[1]] = self._blocks_BJ
        self._blocks_BJ = grown_BJ
