"""Pareto frontiers of tokens/s/GPU against tokens/s/user, and the gain of one frontier over another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array

# Frontiers by title. Each frontier is a pair of arrays (tokens/s/user, tokens/s/GPU).
Series = Mapping[str, tuple[Array, Array]]


def frontier(user_tokens_per_s: Array, gpu_tokens_per_s: Array) -> NDArray[np.intp]:
    """Return the indices of the points that no other point dominates, in ascending order of tokens/s/user.

    If several points are equal, only one is kept.
    """
    order = np.lexsort((-gpu_tokens_per_s, -user_tokens_per_s))
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    rises = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, dtype=np.bool_)
    return np.asarray(order[rises][::-1])


def at_least(user_tokens_per_s: Array, gpu_tokens_per_s: Array, wanted: Array) -> Array:
    """Return, for each `wanted` tokens/s/user, the maximum tokens/s/GPU of the points that reach it; 0 if none does."""
    order = np.argsort(-user_tokens_per_s, kind="stable")
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    reach = np.searchsorted(-user_tokens_per_s[order], -wanted, side="right")
    return np.where(reach > 0, best[np.maximum(reach, 1) - 1], 0.0)


@dataclass(frozen=True)
class Gain:
    """The gain of a set of points over a baseline."""

    interactivity: float  # ratio of the maximum tokens/s/user
    throughput: float  # largest ratio of tokens/s/GPU at equal tokens/s/user
    at_user_tokens_per_s: float  # speed at which `throughput` is reached


@dataclass(frozen=True)
class AtSpeed:
    """The maximum tokens/s/GPU of two sets of points at a given speed per user."""

    user_tokens_per_s: float  # minimum speed
    gpu_tokens_per_s: float  # of the first set; 0 if none of its points reaches the speed
    base_gpu_tokens_per_s: float  # of the baseline; 0 if none of its points reaches the speed

    @property
    def ratio(self) -> float | None:
        """The ratio of both values of tokens/s/GPU; None if the baseline does not reach the speed."""
        return self.gpu_tokens_per_s / self.base_gpu_tokens_per_s if self.base_gpu_tokens_per_s else None


def gain(user: Array, gpu: Array, base_user: Array, base_gpu: Array) -> Gain:
    """Return the gain of points (tokens/s/user, tokens/s/GPU) over a baseline's points. Neither set may be empty."""
    both = min(user.max(), base_user.max())
    wanted = np.unique(np.concatenate([user, base_user]))
    wanted = wanted[wanted <= both]
    ratios = at_least(user, gpu, wanted) / at_least(base_user, base_gpu, wanted)
    best = int(np.argmax(ratios))
    return Gain(float(user.max() / base_user.max()), float(ratios[best]), float(wanted[best]))
