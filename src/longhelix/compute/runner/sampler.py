"""Chooses next tokens from whole rows of logits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.kernels.draw import draw
from longhelix.scheduler.request import SamplingParams


def sample(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """Choose the token at `position`. logits_V: float32, after the repetition penalty. Raises ValueError if no token
    has a probability.

    Greedy sampling takes the lowest id of the largest logits. Otherwise a uniform number, keyed by (seed, position), is
    looked up in the cumulative distribution of the filtered tokens, likeliest first. So the token does not depend on
    other requests, the batch or the layout.
    """
    logits_V = logits_V.cpu()  # where division rounds as in the faster ways
    best = int(logits_V.argmax())  # the index of a NaN, if there is one
    largest = float(logits_V[best])
    if not math.isfinite(largest):
        raise ValueError(f"no token has a probability, because the largest logit is {largest}")
    if params.temperature == 0:
        return best
    # Relative to the largest, because a tiny temperature would make infinities of the logits themselves.
    sorted_V, ids_V = _likeliest_first((logits_V - largest) / params.temperature)
    num_kept = _filter(sorted_V, params)
    cumulative = sorted_V[:num_kept].softmax(-1).cumsum(-1)
    index = torch.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], right=True)
    return int(ids_V[min(int(index), num_kept - 1)])


def sample_rows(logits_SV: Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]) -> list[int]:
    """Choose as `sample` does, or return UNDECIDED, in a fraction of its time. keys: seed and position of each row."""
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
    """Return a number in [0, 1) that depends only on the seed and the position (Philox, counter-based)."""
    # The first number of Philox(key=seed, counter=position), in a tenth of the time.
    _COUNTER[0], _KEY[0] = position, seed
    _philox.state = _BEGIN
    return float(_numbers.random())


def logprobs(logits_V: Tensor, count: int, chosen: int) -> dict[int, float]:
    """Return natural-log probabilities of the `count` likeliest tokens and of the chosen one, likeliest first."""
    logprobs_V = logits_V.log_softmax(-1)
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    entries = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return entries | {chosen: float(logprobs_V[chosen])}


_philox = np.random.Philox(key=0)
_numbers = np.random.Generator(_philox)
_COUNTER, _KEY = np.zeros(4, np.uint64), np.zeros(2, np.uint64)
_BEGIN = _philox.state | {"state": {"counter": _COUNTER, "key": _KEY}}  # nothing is drawn yet


def _likeliest_first(scaled_V: Tensor) -> tuple[Tensor, Tensor]:
    """Sort values of at most 0, like a stable sort in a fraction of its time. Returns values (float64) and ids."""
    # As integers, the bits of negative floats grow when the values fall, once -0 is 0. Ids in the low bits break ties.
    bits_V = (scaled_V.numpy() + np.float32(0)).view(np.uint32)
    keys_V = bits_V.astype(np.uint64) << np.uint64(32) | np.arange(len(bits_V), dtype=np.uint64)
    keys_V.sort()
    sorted_V = (keys_V >> np.uint64(32)).astype(np.uint32).view(np.float32)
    return torch.from_numpy(sorted_V).double(), torch.from_numpy((keys_V & np.uint64(0xFFFFFFFF)).astype(np.int64))


def _filter(sorted_V: Tensor, params: SamplingParams) -> int:
    """Count the logits, sorted largest first, that pass top-k, then top-p, then min-p. At least one passes.

    Uses float64, because float32 sums over many tokens are wrong in the fifth digit, and let in tokens beyond top-p.
    """
    num_kept = min(params.top_k, len(sorted_V)) if params.top_k else len(sorted_V)
    if params.top_p < 1:
        before = sorted_V[:num_kept].softmax(-1).cumsum(-1)
        # A token stays while what lies before it has not yet reached top_p.
        num_kept = 1 + int((before[: num_kept - 1] < params.top_p).sum())
    if params.min_p > 0:
        probabilities = sorted_V[:num_kept].softmax(-1)
        num_kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    return max(num_kept, 1)
