"""A table of integers with one line per live sequence, so that one operation reads or writes many sequences."""

import numpy as np
from numpy.typing import NDArray


class IntTable:
    """A growable table with one line of int64 numbers per live sequence.

    Attributes:
        values: The numbers, (lines, columns). Another array once the table has grown.
        address: Address of `values` in memory.
    """

    def __init__(self, columns: int) -> None:
        self._keep(np.zeros((0, columns), np.int64))
        self._free: list[int] = []

    def _keep(self, values: NDArray[np.int64]) -> None:
        self.values, self.address = values, values.ctypes.data

    def take(self) -> int:
        """Return the index of a free line, filled with zeros."""
        if not self._free:
            count = len(self.values)
            self._free = list(range(count, 2 * count + 8))
            self._keep(np.concatenate([self.values, np.zeros((count + 8, self.values.shape[1]), np.int64)]))
        line = self._free.pop()
        self.values[line] = 0
        return line

    def give_back(self, line: int) -> None:
        """Free a line."""
        self._free.append(line)
