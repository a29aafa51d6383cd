"""Frontiers of tokens/s/GPU over tokens/s/user, and what one gains over another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array

# Tokens/s/user and tokens/s/GPU along frontiers, by title.
Series = Mapping[str, tuple[Array, Array]]


def frontier(user_tokens_per_s: Array, gpu_tokens_per_s: Array) -> NDArray[np.intp]:
    """Indices of the points that no other one dominates, from the least tokens/s/user to the most.

    Of points that are equal in both, one is kept.
    """
    order = np.lexsort((-gpu_tokens_per_s, -user_tokens_per_s))
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    rises = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, dtype=np.bool_)
    return np.asarray(order[rises][::-1])


def at_least(user_tokens_per_s: Array, gpu_tokens_per_s: Array, wanted: Array) -> Array:
    """The max tokens/s/GPU of points that reach `wanted` tokens/s/user; 0 where none does."""
    order = np.argsort(-user_tokens_per_s, kind="stable")
    best = np.maximum.accumulate(gpu_tokens_per_s[order])
    reach = np.searchsorted(-user_tokens_per_s[order], -wanted, side="right")
    return np.where(reach > 0, best[np.maximum(reach, 1) - 1], 0.0)


@dataclass(frozen=True)
class Gain:
    """One set of points over another: of the best tokens/s/user, and of tokens/s/GPU where that is largest.

    `at_user_tokens_per_s`: there.
    """

    interactivity: float
    throughput: float
    at_user_tokens_per_s: float


@dataclass(frozen=True)
class AtSpeed:
    """The max tokens/s/GPU of points, and of a baseline's, that reach `user_tokens_per_s`; 0 where none does."""

    user_tokens_per_s: float
    gpu_tokens_per_s: float
    base_gpu_tokens_per_s: float

    @property
    def ratio(self) -> float | None:
        """None where the baseline does not reach it."""
        return self.gpu_tokens_per_s / self.base_gpu_tokens_per_s if self.base_gpu_tokens_per_s else None


def gain(user: Array, gpu: Array, base_user: Array, base_gpu: Array) -> Gain:
    """Compare points (tokens/s/user, tokens/s/GPU) with a baseline's; neither may be empty."""
    both = min(user.max(), base_user.max())
    wanted = np.unique(np.concatenate([user, base_user]))
    wanted = wanted[wanted <= both]
    ratios = at_least(user, gpu, wanted) / at_least(base_user, base_gpu, wanted)
    best = int(np.argmax(ratios))
    return Gain(float(user.max() / base_user.max()), float(ratios[best]), float(wanted[best]))
