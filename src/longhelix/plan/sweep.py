"""Decode costs of every layout at every batch size that its memory holds, in blocks that a cache holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.memory import memory
from longhelix.perf.setting import Setting
from longhelix.perf.step import token_seconds
from longhelix.plan.space import Space

_BLOCK = 16384
MOST_BATCH = 65536
DecodeSeconds = Callable[[Setting, Layouts, Array, float], Array]  # of a setting, layouts, batches and a context


@dataclass(frozen=True)
class Points:
    """Configurations that fit, arrays (n,): which layout of the space, requests of the whole world, what they give."""

    layout: NDArray[np.intp]
    batch: Array
    gpus: Array
    ttl_s: Array
    memory_bytes: Array

    @property
    def user_tokens_per_s(self) -> Array:
        return 1 / self.ttl_s

    @property
    def gpu_tokens_per_s(self) -> Array:
        return self.batch / self.ttl_s / self.gpus

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Points":
        return Points(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class Sweep:
    """All that fits; `configurations` counts what was looked at.

    `short_bytes`: what each layout lacks for one request.
    """

    space: Space
    points: Points
    configurations: int
    short_bytes: Array


def units(layouts: Layouts) -> Array:
    """Requests of which every stage, and every group that has requests of its own, has one. Others take as long as the
    next multiple of them; where groups have their own, the attention does, and the FFN a little less."""
    return layouts.pp * layouts.dp


def batches(most: int = MOST_BATCH) -> Array:
    """Numbers of requests: every one up to 32, then in steps of a sixteenth."""
    sizes = list(range(1, 33))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 16)
    return np.array([size for size in sizes if size <= most], dtype=np.float64)


def sweep(
    setting: Setting, space: Space, context: float, batch_sizes: Array, seconds: DecodeSeconds = token_seconds
) -> Sweep:
    """Cost every layout at every one of those batch sizes that its memory holds; `seconds`: what a step takes."""
    return _sweep(setting, space, context, batch_sizes, space.layouts.ones, [], seconds)


def full_sweep(setting: Setting, space: Space, context: float, budgets_s: Sequence[float]) -> Sweep:
    """Cost every layout at the batch sizes that matter: what `units` says times each of `batches`, the most that its
    memory holds, and the most that keep each of these TTLs."""
    return _sweep(setting, space, context, batches(), units(space.layouts), [np.inf, *budgets_s], token_seconds)


def _sweep(
    setting: Setting,
    space: Space,
    context: float,
    sizes: Array,
    units: Array,
    budgets_s: Sequence[float],
    seconds: DecodeSeconds,
) -> Sweep:
    blocks = [
        _block(setting, space.layouts, index, context, sizes, units, seconds)
        for index in _blocks(len(space), len(sizes))
    ]
    blocks += [_fullest(setting, space.layouts, context, budget_s) for budget_s in budgets_s]
    alone = memory(setting, space.layouts, 1.0, context).total_bytes
    short_bytes = np.maximum(alone - setting.capacity_bytes(space.layouts), 0.0)
    return Sweep(space, _joined(blocks), len(space) * (len(sizes) + len(budgets_s)), short_bytes)


def _blocks(num_layouts: int, num_sizes: int) -> list[NDArray[np.intp]]:
    """Layouts in runs that with all batch sizes make about _BLOCK configurations."""
    return np.array_split(np.arange(num_layouts), max(1, num_layouts * num_sizes // _BLOCK))


def _block(
    setting: Setting,
    layouts: Layouts,
    index: NDArray[np.intp],
    context: float,
    sizes: Array,
    units: Array,
    seconds: DecodeSeconds,
) -> Points:
    """What fits of some layouts (down) with all batch sizes (across)."""
    block = layouts.take(index).as_column()
    sizes = np.multiply.outer(units[index], sizes)
    needed = memory(setting, block, sizes, context).total_bytes
    fits = needed <= setting.capacity_bytes(block)
    # Batches that no layout of the block holds cost nothing to leave out: memory grows with the batch.
    held = int(fits.any(axis=0).sum())
    ttl_s = seconds(setting, block, sizes[:, :held], context)
    rows, columns = np.nonzero(fits[:, :held])
    return Points(
        index[rows], sizes[rows, columns], block.world_size[rows, 0], ttl_s[rows, columns], needed[rows, columns]
    )


def _fullest(setting: Setting, layouts: Layouts, context: float, budget_s: float) -> Points:
    """Each layout with the most requests that its memory holds and that keep the TTL, and with the most that are whole
    units; without those that keep none."""

    def keeps(batch: Array) -> Mask:
        kept: Mask = memory(setting, layouts, batch, context).total_bytes <= setting.capacity_bytes(layouts)
        if np.isfinite(budget_s):
            held = np.flatnonzero(kept)
            kept[held] = token_seconds(setting, layouts.take(held), batch[held], context) <= budget_s
        return kept

    most, unit = largest(keeps, np.full(len(layouts), float(MOST_BATCH))), units(layouts)
    batch = np.stack([most, most // unit * unit])
    rows, index = np.nonzero(batch > 0)
    kept, batch = layouts.take(index), batch[rows, index]
    needed = memory(setting, kept, batch, context).total_bytes
    return Points(index, batch, kept.world_size, token_seconds(setting, kept, batch, context), needed)


def largest(keeps: Callable[[Array], Mask], most: Array) -> Array:
    """The largest whole numbers up to `most` for which, and for all smaller ones, `keeps` holds; 0 where none is."""
    least = np.zeros_like(most)
    while (least < most).any():
        half = np.ceil((least + most) / 2)
        kept = keeps(half)
        least, most = np.where(kept, half, least), np.where(kept, most, half - 1)
    return least


def _joined(blocks: list[Points]) -> Points:
    names = [field.name for field in fields(Points)]
    if not blocks:
        return Points(np.zeros(0, dtype=np.intp), *(np.zeros(0) for _ in names[1:]))
    return Points(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in names})


def layouts_of(space: Space, points: Points) -> Layouts:
    return space.layouts.take(points.layout)
