"""The projections that begin a block, after its norm, and end it: back to the hidden size, summed over ranks, added to
the residual."""

from typing import Any

from torch import Tensor

from longhelix.kernels import Weight, linear, rms_norm
from longhelix.parallel.collectives import RankGroup


def project_normed(x_TX: Tensor, weight: Weight, norm: Tensor, eps: float, apart: bool, **more: Any) -> Tensor:
    """norm(x_TX) W^T. apart: the norm is an op of its own. more: as in `linear`."""
    if apart:
        return linear(rms_norm(x_TX, norm, eps), weight, **more)
    return linear(x_TX, weight, norm=norm, norm_eps=eps, **more)


def add_projected(hidden_TH: Tensor, x_TX: Tensor, weight: Weight, bias_H: Tensor | None, group: RankGroup) -> Tensor:
    """hidden_TH + sum over the ranks of x_TX W^T + bias; one all-reduce.

    The bias is added after the sum: every rank has all of it.
    """
    if group.size == 1:
        return linear(x_TX, weight, bias=bias_H, residual=hidden_TH)
    hidden_TH = group.all_reduce_add(linear(x_TX, weight), hidden_TH)
    return hidden_TH if bias_H is None else hidden_TH + bias_H
