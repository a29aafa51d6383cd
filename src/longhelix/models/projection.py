"""The projection that ends a block: back to the hidden size, summed over ranks, added to the residual."""

from torch import Tensor

from longhelix.kernels import Weight, linear
from longhelix.parallel.collectives import RankGroup


def add_projected(hidden_TH: Tensor, x_TX: Tensor, weight: Weight, bias_H: Tensor | None, group: RankGroup) -> Tensor:
    """hidden_TH + sum over the ranks of x_TX W^T + bias; one all-reduce.

    The bias is added after the sum: every rank has all of it.
    """
    if group.size == 1:
        return linear(x_TX, weight, bias=bias_H, residual=hidden_TH)
    hidden_TH = group.all_reduce_add(linear(x_TX, weight), hidden_TH)
    return hidden_TH if bias_H is None else hidden_TH + bias_H
