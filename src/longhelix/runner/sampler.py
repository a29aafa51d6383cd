"""Choosing the next token from one row of logits."""

import math

import numpy as np
import torch
from torch import Tensor

from longhelix.request import SamplingParams


def sample(logits_V: Tensor, params: SamplingParams, seed: int, position: int, seen_V: Tensor | None = None) -> int:
    """The token at `position`. logits_V: float32, not changed. seen_V: which tokens prompt and output have so far,
    needed only for a repetition penalty. Raises ValueError if the logits leave no token a probability.

    Greedy takes the lowest id of the largest logits. Otherwise one uniform number, keyed by (seed, position), is looked
    up in the cumulative distribution of what the filters leave, likeliest first. So the token does not depend on other
    requests, the batch or the layout.
    """
    if params.repetition_penalty != 1:
        assert seen_V is not None
        logits_V = _penalise(logits_V, params.repetition_penalty, seen_V)
    best = int(logits_V.argmax())  # of a NaN, if there is one
    largest = float(logits_V[best])
    if not math.isfinite(largest):
        raise ValueError(f"no token has a probability, because the largest logit is {largest}")
    if params.temperature == 0:
        return best
    # Relative to the largest, because a tiny temperature would make infinities of the logits themselves.
    sorted_V, ids_V = ((logits_V - largest) / params.temperature).sort(descending=True, stable=True)
    kept = _filter(sorted_V, params)
    cumulative = sorted_V[:kept].double().softmax(-1).cumsum(-1)
    index = torch.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], right=True)
    return int(ids_V[min(int(index), kept - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on the seed and the position (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def logprobs(logits_V: Tensor, count: int, chosen: int) -> dict[int, float]:
    """Natural-log probabilities of the `count` likeliest tokens and of the chosen one, likeliest first."""
    logprobs_V = logits_V.log_softmax(-1)
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return found | {chosen: float(logprobs_V[chosen])}


def _penalise(logits_V: Tensor, penalty: float, seen_V: Tensor) -> Tensor:
    """Repetition penalty over prompt and output (arXiv 1909.05858, section 4.1)."""
    penalised_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
    return torch.where(seen_V, penalised_V, logits_V)


def _filter(sorted_V: Tensor, params: SamplingParams) -> int:
    """How many of the logits, sorted with the largest first, pass top-k, then top-p, then min-p: at least one."""
    kept = min(params.top_k, len(sorted_V)) if params.top_k else len(sorted_V)
    if params.top_p < 1:
        before = sorted_V[:kept].softmax(-1).cumsum(-1)
        # A token stays while what lies before it has not yet reached top_p.
        kept = 1 + int((before[: kept - 1] < params.top_p).sum())
    if params.min_p > 0:
        probabilities = sorted_V[:kept].softmax(-1)
        kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    return max(kept, 1)
