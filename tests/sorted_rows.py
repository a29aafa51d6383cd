"""One row at a time, sorted whole: as longhelix chose tokens before rows were reduced to candidates."""

import math

import numpy as np
import torch
from torch import Tensor

from longhelix.scheduler.request import SamplingParams


def sample(
    logits_V: Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    seen_V: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> int:
    """The token at `position`. dtype: of the sums that top-p and min-p look at; it was float32."""
    if params.repetition_penalty != 1:
        assert seen_V is not None
        logits_V = _penalise(logits_V, params.repetition_penalty, seen_V)
    best = int(logits_V.argmax())  # of a NaN, if there is one
    largest = float(logits_V[best])
    if not math.isfinite(largest):
        raise ValueError(f"no token has a probability, because the largest logit is {largest}")
    if params.temperature == 0:
        return best
    sorted_V, ids_V = ((logits_V - largest) / params.temperature).sort(descending=True, stable=True)
    kept = _filter(sorted_V.to(dtype), params)
    cumulative = sorted_V[:kept].double().softmax(-1).cumsum(-1)
    index = torch.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], right=True)
    return int(ids_V[min(int(index), kept - 1)])


def uniform(seed: int, position: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _penalise(logits_V: Tensor, penalty: float, seen_V: Tensor) -> Tensor:
    penalised_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
    return torch.where(seen_V, penalised_V, logits_V)


def _filter(sorted_V: Tensor, params: SamplingParams) -> int:
    kept = min(params.top_k, len(sorted_V)) if params.top_k else len(sorted_V)
    if params.top_p < 1:
        before = sorted_V[:kept].softmax(-1).cumsum(-1)
        kept = 1 + int((before[: kept - 1] < params.top_p).sum())
    if params.min_p > 0:
        probabilities = sorted_V[:kept].softmax(-1)
        kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    return max(kept, 1)
