"""Pareto frontiers of tokens/s/GPU against tokens/s/user, and the gain of one over another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array

# Frontiers by title, each as arrays (tokens/s/user, tokens/s/GPU).
Series = Mapping[str, tuple[Array, Array]]


def frontier(user_tokens_per_s: Array, gpu_tokens_per_s: Array) -> NDArray[np.intp]:
    """Indices of the points that no other point dominates, in ascending order of tokens/s/user.

    Keeps one of several equal points.
    """
    order = np.lexsort((-gpu_tokens_per_s, -user_tokens_per_s))
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    rises = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, dtype=np.bool_)
    return np.asarray(order[rises][::-1])


def at_least(user_tokens_per_s: Array, gpu_tokens_per_s: Array, wanted: Array) -> Array:
    """The max tokens/s/GPU of the points with at least `wanted` tokens/s/user; 0 if there are none."""
    order = np.argsort(-user_tokens_per_s, kind="stable")
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    reach = np.searchsorted(-user_tokens_per_s[order], -wanted, side="right")
    return np.where(reach > 0, best[np.maximum(reach, 1) - 1], 0.0)


@dataclass(frozen=True)
class Gain:
    """The gain of a set of points over a baseline."""

    interactivity: float  # ratio of the max tokens/s/user
    throughput: float  # the largest ratio of tokens/s/GPU at equal tokens/s/user
    at_user_tokens_per_s: float  # where `throughput` is reached


@dataclass(frozen=True)
class AtSpeed:
    """The max tokens/s/GPU of two sets of points at a given speed per user."""

    user_tokens_per_s: float  # the minimum speed
    gpu_tokens_per_s: float  # 0 if no point is as fast
    base_gpu_tokens_per_s: float  # of the baseline; 0 if no point is as fast

    @property
    def ratio(self) -> float | None:
        """The gain in tokens/s/GPU; None if the baseline does not reach the speed."""
        return self.gpu_tokens_per_s / self.base_gpu_tokens_per_s if self.base_gpu_tokens_per_s else None


def gain(user: Array, gpu: Array, base_user: Array, base_gpu: Array) -> Gain:
    """Compare points (tokens/s/user, tokens/s/GPU) with those of a baseline. Neither may be empty."""
    both = min(user.max(), base_user.max())
    wanted = np.unique(np.concatenate([user, base_user]))
    wanted = wanted[wanted <= both]
    ratios = at_least(user, gpu, wanted) / at_least(base_user, base_gpu, wanted)
    best = int(np.argmax(ratios))
    return Gain(float(user.max() / base_user.max()), float(ratios[best]), float(wanted[best]))
