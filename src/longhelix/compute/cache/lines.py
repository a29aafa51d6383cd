"""Numbers of things that come and go, side by side: a line for each, so that one operation reads or writes many."""

import numpy as np
from numpy.typing import NDArray


class Lines:
    """`values`, int64: a line of `columns` numbers for each of those that have taken one. It is another array, at
    another address, once more lines are taken than it has."""

    def __init__(self, columns: int) -> None:
        self._keep(np.zeros((0, columns), np.int64))
        self._free: list[int] = []

    def _keep(self, values: NDArray[np.int64]) -> None:
        self.values, self.address = values, values.ctypes.data

    def take(self) -> int:
        """A line of zeros."""
        if not self._free:
            count = len(self.values)
            self._free = list(range(count, 2 * count + 8))
            self._keep(np.concatenate([self.values, np.zeros((count + 8, self.values.shape[1]), np.int64)]))
        line = self._free.pop()
        self.values[line] = 0
        return line

    def give_back(self, line: int) -> None:
        self._free.append(line)
