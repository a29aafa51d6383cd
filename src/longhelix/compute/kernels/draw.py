"""Draws from whole rows of logits, natively, without sorting them; the reference is `compute/runner/sampler.py`."""

import torch
from torch import Tensor

from longhelix.compute.kernels import native

UNDECIDED = -1


def draw(
    logits_SV: Tensor, temperatures_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor, numbers_S: Tensor
) -> Tensor:
    """Of each row the token at a number of the cumulative distribution of what the filters leave, likeliest first.

    All on the CPU. logits_SV: float32, rows contiguous. temperatures_S: float32. top_k_S: int64, at least 1. top_p_S,
    min_p_S, numbers_S (in [0, 1)): float64. Returns int64: UNDECIDED where the order in which float64 are added would
    decide, of temperature 0, where a row has no finite largest logit, and everywhere without the native kernels.
    """
    tokens_S = torch.full((len(logits_SV),), UNDECIDED)
    if native.module is not None and len(logits_SV):
        operands = (temperatures_S, top_k_S, top_p_S, min_p_S, numbers_S, tokens_S)
        addresses = (tensor.data_ptr() for tensor in operands)
        native.module.draw(logits_SV.data_ptr(), logits_SV.stride(0), *logits_SV.shape, *addresses)
    return tokens_S
