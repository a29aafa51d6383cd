"""The start and end of a block: the norm and the first product, and the last product, summed over ranks, normed and
added to the residual."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longhelix.compute.kernels import Weight, linear, quantise_rows, rms_norm
from longhelix.compute.models.batch import Batch
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.spec import FORMATS


@dataclass(frozen=True)
class Residual:
    """How the output of a block is added to the residual.

    Attributes:
        norm: Weight of the norm of the output. None if there is none.
        eps: Added to the mean square in the norm.
        scale: The output is scaled by it, after the norm.
    """

    norm: Tensor | None
    eps: float
    scale: float

    @property
    def is_plain(self) -> bool:
        """Whether the output is added as it is."""
        return self.norm is None and self.scale == 1

    def add(self, hidden_XH: Tensor, out_XH: Tensor) -> Tensor:
        """Return hidden_XH with the output added."""
        if self.norm is not None:
            out_XH = rms_norm(out_XH, self.norm, self.eps)
        return hidden_XH + (out_XH if self.scale == 1 else out_XH * self.scale)


def normed(
    hidden_XH: Tensor, norm: Tensor | None, eps: float, batch: Batch, weight_dtype: str
) -> tuple[Tensor, dict[str, Any]]:
    """Return all rows of hidden states, x_TH, and arguments of `linear`, which include the norm if it is not done yet.

    Without a norm, the rows stay as they are.

    Token shards are gathered after the norm, as int8 and scales if products with `weight_dtype` round their inputs. For
    a compiler pass that gathers, the norm and the rounding are separate ops.
    """
    token_shards = batch.sharding.token_shards
    if token_shards is None and batch.sharding.pass_shards is None:
        return hidden_XH, {"norm": norm, "norm_eps": eps}
    gather = _unchanged if token_shards is None else token_shards.all_rows
    if FORMATS[weight_dtype].arithmetic.rounds_inputs:
        q_XH, scales_XX = quantise_rows(hidden_XH, norm=norm, norm_eps=eps)
        return gather(q_XH), {"scales_TX": gather(scales_XX), "dtype": hidden_XH.dtype}
    return gather(hidden_XH if norm is None else rms_norm(hidden_XH, norm, eps)), {}


def _unchanged(x_TH: Tensor) -> Tensor:
    return x_TH


def normed_local_rows(
    hidden_XH: Tensor, norm: Tensor | None, eps: float, batch: Batch, weight_dtype: str
) -> tuple[Tensor, dict[str, Any]]:
    """Return the same as `normed` for the rows that attend on this rank, x_tH."""
    x_TH, options = normed(hidden_XH, norm, eps, batch, weight_dtype)
    if "scales_TX" in options:
        options["scales_TX"] = batch.local_rows(options["scales_TX"])
    return batch.local_rows(x_TH), options


def project_normed(
    hidden_XH: Tensor, weight: Weight, norm: Tensor | None, eps: float, batch: Batch, **options: Any
) -> Tensor:
    """Return norm(hidden_XH) W^T of all rows. Multiplies token shards that have arrived while others travel.

    Args:
        options: Arguments of `linear`.
    """
    token_shards = batch.sharding.token_shards
    if token_shards is None:
        x_TH, norm_options = normed(hidden_XH, norm, eps, batch, weight.dtype)
        return linear(x_TH, weight, **norm_options, **options)
    if not FORMATS[weight.dtype].arithmetic.rounds_inputs:
        x_LH = hidden_XH if norm is None else rms_norm(hidden_XH, norm, eps)
        return token_shards.gathered_product((x_LH,), lambda x: linear(x, weight, **options))
    return token_shards.gathered_product(
        quantise_rows(hidden_XH, norm=norm, norm_eps=eps),
        lambda q, scales: linear(q, weight, scales_TX=scales, dtype=hidden_XH.dtype, **options),
    )


def add_projected(
    hidden_XH: Tensor,
    x_TX: Tensor,
    weight: Weight,
    bias_H: Tensor | None,
    residual: Residual,
    group: RankGroup,
    batch: Batch,
) -> Tensor:
    """Return hidden_XH with the sum over the ranks of x_TX W^T, and the bias, added as `residual` says.

    The bias is added after the sum, because every rank has all of it.
    """
    if residual.norm is None and residual.scale != 1:
        x_TX, bias_H = x_TX * residual.scale, None if bias_H is None else bias_H * residual.scale
    if residual.norm is not None:
        return residual.add(hidden_XH, _projected(hidden_XH, x_TX, weight, bias_H, group, batch))
    if group.size == 1:
        return linear(x_TX, weight, bias=bias_H, residual=hidden_XH)
    if batch.sharding.token_shards is None:
        hidden_XH = group.all_reduce_add(linear(x_TX, weight), hidden_XH)
    else:
        hidden_XH = hidden_XH + _projected(hidden_XH, x_TX, weight, None, group, batch)
    return hidden_XH if bias_H is None else hidden_XH + bias_H


def _projected(
    hidden_XH: Tensor, x_TX: Tensor, weight: Weight, bias_H: Tensor | None, group: RankGroup, batch: Batch
) -> Tensor:
    """Return the rows of hidden_XH of the sum over the ranks of x_TX W^T, and the bias."""
    token_shards = batch.sharding.token_shards
    if group.size == 1:
        return linear(x_TX, weight, bias=bias_H)
    if token_shards is None:
        out_XH = group.all_reduce(linear(x_TX, weight))
    else:
        row_bytes = hidden_XH.shape[1] * hidden_XH.element_size()
        out_XH = token_shards.summed_product(x_TX, lambda x: linear(x, weight), row_bytes)
    return out_XH if bias_H is None else out_XH + bias_H
