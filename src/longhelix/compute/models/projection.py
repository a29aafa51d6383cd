"""How a block begins and ends: its norm before the first product, and the last one summed over ranks and added to the
residual."""

from typing import Any

from torch import Tensor

from longhelix.compute.kernels import Weight, linear, quantise_rows, rms_norm
from longhelix.compute.models.batch import Batch
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.spec import FORMATS


def normed(
    hidden_XH: Tensor, norm: Tensor, eps: float, batch: Batch, weight_dtype: str
) -> tuple[Tensor, dict[str, Any]]:
    """All rows of hidden states, x_TH, and what `linear` is to do with them: the norm, where that is left to it.

    Of token shards they are gathered after the norm, as bytes and scales if products with `weight_dtype` round them to
    these anyway. A compiler pass that does that sees both as ops of their own.
    """
    token_shards = batch.sharding.token_shards
    if token_shards is None and batch.sharding.pass_shards is None:
        return hidden_XH, {"norm": norm, "norm_eps": eps}
    gather = _unchanged if token_shards is None else token_shards.whole
    if FORMATS[weight_dtype].rounds_inputs:
        q_XH, scales_XX = quantise_rows(hidden_XH, norm=norm, norm_eps=eps)
        return gather(q_XH), {"scales_TX": gather(scales_XX), "dtype": hidden_XH.dtype}
    return gather(rms_norm(hidden_XH, norm, eps)), {}


def _unchanged(x_TH: Tensor) -> Tensor:
    return x_TH


def own_normed(
    hidden_XH: Tensor, norm: Tensor, eps: float, batch: Batch, weight_dtype: str
) -> tuple[Tensor, dict[str, Any]]:
    """The same of the rows that attend on this rank, x_tH."""
    x_TH, more = normed(hidden_XH, norm, eps, batch, weight_dtype)
    if "scales_TX" in more:
        more["scales_TX"] = batch.own_rows(more["scales_TX"])
    return batch.own_rows(x_TH), more


def project_normed(hidden_XH: Tensor, weight: Weight, norm: Tensor, eps: float, batch: Batch, **more: Any) -> Tensor:
    """norm(hidden_XH) W^T of all rows. more: as in `linear`. Of token shards, rows that are there are multiplied while
    others travel."""
    token_shards = batch.sharding.token_shards
    if token_shards is None:
        x_TH, how = normed(hidden_XH, norm, eps, batch, weight.dtype)
        return linear(x_TH, weight, **how, **more)
    if not FORMATS[weight.dtype].rounds_inputs:
        return token_shards.gathered_product((rms_norm(hidden_XH, norm, eps),), lambda x: linear(x, weight, **more))
    return token_shards.gathered_product(
        quantise_rows(hidden_XH, norm=norm, norm_eps=eps),
        lambda q, scales: linear(q, weight, scales_TX=scales, dtype=hidden_XH.dtype, **more),
    )


def add_projected(
    hidden_XH: Tensor,
    x_TX: Tensor,
    weight: Weight,
    bias_H: Tensor | None,
    group: RankGroup,
    batch: Batch,
    scale: float = 1.0,
) -> Tensor:
    """hidden_XH + scale * (sum over the ranks of x_TX W^T + bias).

    The bias is added after the sum: every rank has all of it.
    """
    if scale != 1:
        x_TX, bias_H = x_TX * scale, None if bias_H is None else bias_H * scale
    if group.size == 1:
        return linear(x_TX, weight, bias=bias_H, residual=hidden_XH)
    token_shards = batch.sharding.token_shards
    if token_shards is None:
        hidden_XH = group.all_reduce_add(linear(x_TX, weight), hidden_XH)
    else:
        row_bytes = hidden_XH.shape[1] * hidden_XH.element_size()
        hidden_XH = hidden_XH + token_shards.summed_product(x_TX, lambda x: linear(x, weight), row_bytes)
    return hidden_XH if bias_H is None else hidden_XH + bias_H
