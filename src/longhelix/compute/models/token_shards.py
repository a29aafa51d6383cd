"""Token shards: between products, each rank of an FFN group has hidden states of only some rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.spec.layout import split

_PIECE_BYTES, _MOST_PIECES = 256 * 1024, 4


@dataclass(frozen=True)
class TokenShards:
    """Splits the T rows of token_ids_T over `group`: rank r has rows [r L, (r + 1) L), L = ceil(T / n).

    If n does not divide T, the last rows are padding (Megatron, arXiv 2205.05198; Flash Comm V1 of vllm-ascend).
    """

    group: RankGroup
    token_ids_T: Tensor  # instead of T, so that a graph supports any T

    @property
    def rows(self) -> int:
        """L, the rows of each rank."""
        return (self.tokens + self.group.size - 1) // self.group.size

    @property
    def tokens(self) -> int:
        """T, the rows of all ranks."""
        return self.token_ids_T.shape[0]

    @property
    def first(self) -> int:
        """Index of this rank's first row."""
        return self.group.index * self.rows

    def local_rows(self, x_TX: Tensor) -> Tensor:
        """Return this rank's rows of x_TX, x_LX."""
        return self._padded(x_TX)[self.first : self.first + self.rows]

    def all_rows(self, x_LX: Tensor) -> Tensor:
        """Gather the rows of all ranks, x_TX, in one all-gather."""
        return self.group.all_gather(x_LX)[: self.tokens]

    def summed_rows(self, x_TX: Tensor) -> Tensor:
        """Return this rank's rows of the sum over the ranks, x_LX, after one reduce-scatter."""
        return self.group.reduce_scatter(self._padded(x_TX))

    def gathered_product(self, x_LX: tuple[Tensor, ...], multiply: Callable[..., Tensor]) -> Tensor:
        """Return multiply(all rows of each of x_LX), y_TY. Multiplies pieces of rows while other pieces travel."""
        pieces = self._pieces(x_LX[0].shape[1] * x_LX[0].element_size())
        started = [[self.group.start_all_gather(each[rows]) for each in x_LX] for rows in pieces]
        products = [multiply(*(finish() for finish in finishes)) for finishes in started]
        if len(products) == 1:
            return products[0][: self.tokens]
        return torch.cat([each.unflatten(0, (self.group.size, -1)) for each in products], 1).flatten(0, 1)[
            : self.tokens
        ]

    def summed_product(self, x_TX: Tensor, multiply: Callable[[Tensor], Tensor], row_bytes: int) -> Tensor:
        """Return this rank's rows of the sum over the ranks of multiply(x_TX), y_LY.

        Pieces of rows travel while others are multiplied. row_bytes: bytes of a row of y.
        """
        pieces = self._pieces(row_bytes)
        if len(pieces) == 1:
            return self.summed_rows(multiply(x_TX))
        parts_nLX = self._padded(x_TX).unflatten(0, (self.group.size, -1))
        started = [self.group.start_reduce_scatter(multiply(parts_nLX[:, rows].flatten(0, 1))) for rows in pieces]
        return torch.cat([finish() for finish in started])

    def _pieces(self, row_bytes: int) -> list[slice]:
        """Return slices of a shard's rows that travel together: several over gloo, otherwise one.

        With shared memory, nothing travels while a rank computes. On GPUs, smaller products may cost more than the
        overlap gains, which was not measured.
        """
        if torch.compiler.is_compiling() or not self.group.is_gloo:
            return [slice(None)]
        count = max(min(self.rows * row_bytes // _PIECE_BYTES, self.rows, _MOST_PIECES), 1)
        return [slice(part.start, part.stop) for part in split(self.rows, count)]

    def _padded(self, x_TX: Tensor) -> Tensor:
        return pad(x_TX, (0, 0, 0, self.rows * self.group.size - self.tokens))
