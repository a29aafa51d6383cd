"""Hidden states as token shards: each rank of an FFN group has some of a step's rows between its products."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from longhelix.parallel.collectives import RankGroup


@dataclass(frozen=True)
class TokenShards:
    """Rank r of `group` has the rows [r L, (r + 1) L) of the T rows of token_ids_T, L = ceil(T / n); the last ones are
    padding where n does not divide T (Megatron, arXiv 2205.05198; Flash Comm V1 of vllm-ascend)."""

    group: RankGroup
    token_ids_T: Tensor  # and not T, so that a graph is for any number of them

    @property
    def rows(self) -> int:
        """L."""
        return (self.tokens + self.group.size - 1) // self.group.size

    @property
    def tokens(self) -> int:
        """T."""
        return self.token_ids_T.shape[0]

    @property
    def first(self) -> int:
        """This rank's first row."""
        return self.group.index * self.rows

    def own(self, x_TX: Tensor) -> Tensor:
        """This rank's rows, x_LX, of what all ranks have."""
        return self._padded(x_TX)[self.first : self.first + self.rows]

    def whole(self, x_LX: Tensor) -> Tensor:
        """All rows, x_TX; one all-gather."""
        return self.group.all_gather(x_LX)[: self.tokens]

    def summed(self, x_TX: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks, x_LX; one reduce-scatter."""
        return self.group.reduce_scatter(self._padded(x_TX))

    def _padded(self, x_TX: Tensor) -> Tensor:
        return pad(x_TX, (0, 0, 0, self.rows * self.group.size - self.tokens))
