"""What Helix's Figures 5 to 7 compare: frontiers of strategies, gains over the baseline, and what HOP-B saves."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds
from longhelix.plan.pareto import Gain, at_least, frontier, gain
from longhelix.plan.space import STRATEGIES, Space, space
from longhelix.plan.sweep import DecodeSeconds, Points, batches, sweep

CONTEXT = 1e6
HELIX = ("helix_exposed", "helix")
_NOT_COMPARED = ("helix_dp",)  # the paper has no groups beside KVP
MAX_GPUS = 64
_NAMES = tuple(strategy.name for strategy in STRATEGIES)
_MOST_BATCH = 4096


@dataclass(frozen=True)
class Loss:
    """The share of tokens/s/user lost at fixed tokens/s/GPU, over the points of a frontier."""

    median: float
    most: float


@dataclass(frozen=True)
class Frontiers:
    """All configurations of one model that fit; `names`: each one's strategy."""

    points: Points
    names: np.ndarray[tuple[int], np.dtype[np.str_]]
    configurations: int

    def of(self, *names: str) -> Points:
        return self.points.take(np.isin(self.names, names))

    def gain(self, baseline: tuple[str, ...]) -> Gain:
        """Helix, with or without HOP-B, over the strategies `baseline`."""
        ours, base = self.of(*HELIX), self.of(*baseline)
        return gain(ours.user_tokens_per_s, ours.gpu_tokens_per_s, base.user_tokens_per_s, base.gpu_tokens_per_s)

    def loss_without_hop_b(self) -> Loss:
        """At the tokens/s/GPU of every point of the frontier with HOP-B that is reached without it."""
        exposed, hidden = self.of("helix_exposed"), best(self.of("helix"))
        wanted = hidden.gpu_tokens_per_s[hidden.gpu_tokens_per_s <= exposed.gpu_tokens_per_s.max()]
        without = at_least(exposed.gpu_tokens_per_s, exposed.user_tokens_per_s, wanted)
        lost = 1 - without / at_least(hidden.gpu_tokens_per_s, hidden.user_tokens_per_s, wanted)
        return Loss(float(np.median(lost)), float(lost.max()))


def best(points: Points) -> Points:
    """The frontier of `points`."""
    return points.take(frontier(points.user_tokens_per_s, points.gpu_tokens_per_s))


def frontiers(setting: Setting, *, powers_of_two: bool, seconds: DecodeSeconds = decode_seconds) -> Frontiers:
    """Every layout of up to MAX_GPUS GPUs at CONTEXT tokens; GPUs and batch sizes all, or powers of two alone.

    seconds: what a decode step takes.
    """
    chosen, sizes = space(setting.model, MAX_GPUS), batches(_MOST_BATCH)
    keep = ~np.isin(np.array(_NAMES)[chosen.strategy], _NOT_COMPARED)
    if powers_of_two:
        keep &= np.log2(chosen.layouts.world_size) % 1 == 0
    chosen = Space(chosen.layouts.take(keep), chosen.strategy[keep])
    if powers_of_two:
        sizes = 2.0 ** np.arange(np.log2(_MOST_BATCH) + 1)
    found = sweep(setting, chosen, CONTEXT, sizes, seconds)
    return Frontiers(found.points, np.array(_NAMES)[chosen.strategy[found.points.layout]], found.configurations)


@dataclass(frozen=True)
class Headline:
    """The paper's results for one model: gains over the best baseline, what HOP-B saves, configurations looked at."""

    gain: Gain
    loss: Loss
    configurations: int


def headline(
    setting: Setting,
    baseline: tuple[str, ...],
    *,
    coarse_gain: bool = True,
    coarse_loss: bool = False,
    seconds: DecodeSeconds = decode_seconds,
) -> Headline:
    """Each with all numbers of GPUs and batch sizes, or (coarse) with powers of two alone; `seconds`: of a step."""
    fine, coarse = (frontiers(setting, powers_of_two=powers, seconds=seconds) for powers in (False, True))
    gained = (coarse if coarse_gain else fine).gain(baseline)
    lost = (coarse if coarse_loss else fine).loss_without_hop_b()
    return Headline(gained, lost, fine.configurations)


def normalised(points: Points, base: Points) -> tuple[Array, Array]:
    """The frontier's tokens/s/user and tokens/s/GPU, over the best of each that `base` reaches."""
    edge = best(points)
    return (
        edge.user_tokens_per_s / base.user_tokens_per_s.max(),
        edge.gpu_tokens_per_s / base.gpu_tokens_per_s.max(),
    )
