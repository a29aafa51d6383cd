"""Choosing next tokens from whole rows of logits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.kernels.draw import draw
from longhelix.scheduler.request import SamplingParams


def sample(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position`. logits_V: float32, after the repetition penalty; not changed. Raises ValueError if the
    logits leave no token a probability.

    Greedy takes the lowest id of the largest logits. Otherwise one uniform number, keyed by (seed, position), is looked
    up in the cumulative distribution of what the filters leave, likeliest first. So the token does not depend on other
    requests, the batch or the layout.
    """
    logits_V = logits_V.cpu()  # which divides as the faster ways do
    best = int(logits_V.argmax())  # of a NaN, if there is one
    largest = float(logits_V[best])
    if not math.isfinite(largest):
        raise ValueError(f"no token has a probability, because the largest logit is {largest}")
    if params.temperature == 0:
        return best
    # Relative to the largest, because a tiny temperature would make infinities of the logits themselves.
    sorted_V, ids_V = _likeliest_first((logits_V - largest) / params.temperature)
    kept = _filter(sorted_V, params)
    cumulative = sorted_V[:kept].softmax(-1).cumsum(-1)
    index = torch.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], right=True)
    return int(ids_V[min(int(index), kept - 1)])


def sample_rows(logits_SV: Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]) -> list[int]:
    """What `sample` says of rows, or UNDECIDED, in a fraction of its time. keys: seed and position of each row."""
    top_k = [each.top_k or logits_SV.shape[1] for each in params]
    return draw(
        logits_SV.cpu(),
        torch.tensor([each.temperature for each in params], dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor([each.top_p for each in params], dtype=torch.float64),
        torch.tensor([each.min_p for each in params], dtype=torch.float64),
        torch.tensor([uniform(*key) for key in keys], dtype=torch.float64),
    ).tolist()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on the seed and the position (Philox, counter-based)."""
    # What Philox(key=seed, counter=position) starts with, in a tenth of its time.
    _COUNTER[0], _KEY[0] = position, seed
    _philox.state = _BEGIN
    return float(_numbers.random())


def logprobs(logits_V: Tensor, count: int, chosen: int) -> dict[int, float]:
    """Natural-log probabilities of the `count` likeliest tokens and of the chosen one, likeliest first."""
    logprobs_V = logits_V.log_softmax(-1)
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return found | {chosen: float(logprobs_V[chosen])}


_philox = np.random.Philox(key=0)
_numbers = np.random.Generator(_philox)
_COUNTER, _KEY = np.zeros(4, np.uint64), np.zeros(2, np.uint64)
_BEGIN = _philox.state | {"state": {"counter": _COUNTER, "key": _KEY}}  # nothing is drawn yet


def _likeliest_first(scaled_V: Tensor) -> tuple[Tensor, Tensor]:
    """Values, which are at most 0, as float64, and ids, in the order of a stable sort, in a fraction of its time."""
    # The bits of negative floats grow as they fall, once -0 is 0; ids below them order equal ones.
    bits_V = (scaled_V.numpy() + np.float32(0)).view(np.uint32)
    keys_V = bits_V.astype(np.uint64) << np.uint64(32) | np.arange(len(bits_V), dtype=np.uint64)
    keys_V.sort()
    sorted_V = (keys_V >> np.uint64(32)).astype(np.uint32).view(np.float32)
    return torch.from_numpy(sorted_V).double(), torch.from_numpy((keys_V & np.uint64(0xFFFFFFFF)).astype(np.int64))


def _filter(sorted_V: Tensor, params: SamplingParams) -> int:
    """How many of the logits, sorted with the largest first, pass top-k, then top-p, then min-p: at least one.

    In float64: sums of many tokens in float32 are wrong in the fifth digit, and let in tokens that top-p leaves out.
    """
    kept = min(params.top_k, len(sorted_V)) if params.top_k else len(sorted_V)
    if params.top_p < 1:
        before = sorted_V[:kept].softmax(-1).cumsum(-1)
        # A token stays while what lies before it has not yet reached top_p.
        kept = 1 + int((before[: kept - 1] < params.top_p).sum())
    if params.min_p > 0:
        probabilities = sorted_V[:kept].softmax(-1)
        kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    return max(kept, 1)
