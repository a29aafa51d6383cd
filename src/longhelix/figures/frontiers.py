"""Compute figures 5 to 7 of Helix: frontiers of strategies, gains over the baseline, and the loss without HOP-B."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds
from longhelix.plan.pareto import Gain, at_least, frontier, gain
from longhelix.plan.space import STRATEGIES, Space, space
from longhelix.plan.sweep import DecodeSeconds, Points, batches, sweep

CONTEXT = 1e6  # tokens
HELIX = ("helix_exposed", "helix")
_NOT_COMPARED = ("helix_dp",)  # the paper does not combine KVP with data-parallel groups
MAX_GPUS = 64
_NAMES = tuple(strategy.name for strategy in STRATEGIES)
_MOST_BATCH = 4096


@dataclass(frozen=True)
class Loss:
    """The fraction of tokens/s/user that is lost at equal tokens/s/GPU, over the points of a frontier."""

    median: float
    most: float  # maximum


@dataclass(frozen=True)
class Frontiers:
    """The configurations of one model that fit in memory."""

    points: Points
    names: np.ndarray[tuple[int], np.dtype[np.str_]]  # strategy of each point
    configurations: int  # number of configurations evaluated

    def of(self, *names: str) -> Points:
        """Return the points of the named strategies."""
        return self.points.take(np.isin(self.names, names))

    def gain(self, baseline: tuple[str, ...]) -> Gain:
        """Return the gain of Helix, with or without HOP-B, over the strategies in `baseline`."""
        ours, base = self.of(*HELIX), self.of(*baseline)
        return gain(ours.user_tokens_per_s, ours.gpu_tokens_per_s, base.user_tokens_per_s, base.gpu_tokens_per_s)

    def loss_without_hop_b(self) -> Loss:
        """Return the loss without HOP-B over the points of the frontier with HOP-B.

        The loss excludes points whose tokens/s/GPU no layout without HOP-B reaches.
        """
        exposed, hidden = self.of("helix_exposed"), best(self.of("helix"))
        wanted = hidden.gpu_tokens_per_s[hidden.gpu_tokens_per_s <= exposed.gpu_tokens_per_s.max()]
        without = at_least(exposed.gpu_tokens_per_s, exposed.user_tokens_per_s, wanted)
        lost = 1 - without / at_least(hidden.gpu_tokens_per_s, hidden.user_tokens_per_s, wanted)
        return Loss(float(np.median(lost)), float(lost.max()))


def best(points: Points) -> Points:
    """Return the points on the frontier."""
    return points.take(frontier(points.user_tokens_per_s, points.gpu_tokens_per_s))


def frontiers(setting: Setting, *, powers_of_two: bool, seconds: DecodeSeconds = decode_seconds) -> Frontiers:
    """Evaluate the layouts of up to MAX_GPUS GPUs at CONTEXT tokens.

    Args:
        powers_of_two: True to evaluate only numbers of GPUs and batch sizes that are powers of two.
        seconds: function that returns the time of a decode step.
    """
    chosen, sizes = space(setting.model, MAX_GPUS), batches(_MOST_BATCH)
    keep = ~np.isin(np.array(_NAMES)[chosen.strategy], _NOT_COMPARED)
    if powers_of_two:
        keep &= np.log2(chosen.layouts.world_size) % 1 == 0
    chosen = Space(chosen.layouts.take(keep), chosen.strategy[keep])
    if powers_of_two:
        sizes = 2.0 ** np.arange(np.log2(_MOST_BATCH) + 1)
    found = sweep(setting, space=chosen, context=CONTEXT, batch_sizes=sizes, seconds=seconds)
    return Frontiers(found.points, np.array(_NAMES)[chosen.strategy[found.points.layout]], found.configurations)


@dataclass(frozen=True)
class Headline:
    """The paper's headline numbers for one model."""

    gain: Gain  # of Helix over the best baseline
    loss: Loss  # without HOP-B
    configurations: int  # number of configurations evaluated


def headline(
    setting: Setting,
    baseline: tuple[str, ...],
    *,
    coarse_gain: bool = True,
    coarse_loss: bool = False,
    seconds: DecodeSeconds = decode_seconds,
) -> Headline:
    """Compute the paper's headline numbers for one model.

    Args:
        baseline: strategies to compare Helix with.
        coarse_gain: True to compute the gain only with numbers of GPUs and batch sizes that are powers of two.
        coarse_loss: the same as `coarse_gain`, but for the loss without HOP-B.
        seconds: function that returns the time of a decode step.
    """
    fine, coarse = (frontiers(setting, powers_of_two=powers, seconds=seconds) for powers in (False, True))
    gained = (coarse if coarse_gain else fine).gain(baseline)
    lost = (coarse if coarse_loss else fine).loss_without_hop_b()
    return Headline(gained, lost, fine.configurations)


def normalised(points: Points, base: Points) -> tuple[Array, Array]:
    """Return tokens/s/user and tokens/s/GPU of the frontier of `points`, relative to the best values of `base`."""
    edge = best(points)
    return (
        edge.user_tokens_per_s / base.user_tokens_per_s.max(),
        edge.gpu_tokens_per_s / base.gpu_tokens_per_s.max(),
    )
