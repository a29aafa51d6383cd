"""Decode costs of every layout at every batch size that its memory holds, in blocks that a cache holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.setting import Setting
from longhelix.perf.step import token_seconds
from longhelix.plan.service import Use
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
    """Cost every layout at every one of those batch sizes that its memory holds, of requests of `context` tokens;
    `seconds`: what a step takes."""
    return _sweep(Use(setting, int(context)), space, batch_sizes, space.layouts.ones, [], seconds)


def unit_sweep(use: Use, space: Space, batch_sizes: Array) -> Sweep:
    """Cost every layout at what `units` says times each of those sizes, where its memory holds them."""
    return _sweep(use, space, batch_sizes, units(space.layouts), [])


def full_sweep(use: Use, space: Space, budgets_s: Sequence[float]) -> Sweep:
    """Cost every layout at the batch sizes that matter: what `units` says times each of `batches`, the most that its
    memory holds, and the most that keep each of these TTLs."""
    return _sweep(use, space, batches(), units(space.layouts), [np.inf, *budgets_s])


def _sweep(
    use: Use,
    space: Space,
    sizes: Array,
    units: Array,
    budgets_s: Sequence[float],
    seconds: DecodeSeconds = token_seconds,
) -> Sweep:
    blocks = [_block(use, space.layouts, index, sizes, units, seconds) for index in _blocks(len(space), len(sizes))]
    blocks += [_fullest(use, space.layouts, budget_s) for budget_s in budgets_s]
    alone = use.memory_bytes(space.layouts, 1.0, 0.0)
    short_bytes = np.maximum(alone - use.setting.capacity_bytes(space.layouts), 0.0)
    return Sweep(space, _joined(blocks), len(space) * (len(sizes) + len(budgets_s)), short_bytes)


def _blocks(num_layouts: int, num_sizes: int) -> list[NDArray[np.intp]]:
    """Layouts in runs that with all batch sizes make about _BLOCK configurations."""
    return np.array_split(np.arange(num_layouts), max(1, num_layouts * num_sizes // _BLOCK))


def _block(
    use: Use, layouts: Layouts, index: NDArray[np.intp], sizes: Array, units: Array, seconds: DecodeSeconds
) -> Points:
    """What fits of some layouts (down) with all batch sizes (across)."""
    block = layouts.take(index).as_column()
    sizes = np.multiply.outer(units[index], sizes)
    needed = use.memory_bytes(block, sizes, 0.0)
    fits = needed <= use.setting.capacity_bytes(block)
    # Batches that no layout of the block holds cost nothing to leave out: memory grows with the batch.
    held = int(fits.any(axis=0).sum())
    ttl_s = seconds(use.setting, block, sizes[:, :held], use.kv_tokens)
    rows, columns = np.nonzero(fits[:, :held])
    return Points(
        index[rows], sizes[rows, columns], block.world_size[rows, 0], ttl_s[rows, columns], needed[rows, columns]
    )


def _fullest(use: Use, layouts: Layouts, budget_s: float) -> Points:
    """Each layout with the most requests that its memory holds and that keep the TTL, and with the most that are whole
    units; without those that keep none."""

    def keeps(batch: Array) -> Mask:
        kept: Mask = use.memory_bytes(layouts, batch, 0.0) <= use.setting.capacity_bytes(layouts)
        if np.isfinite(budget_s):
            held = np.flatnonzero(kept)
            kept[held] = use.token_seconds(layouts.take(held), batch[held]) <= budget_s
        return kept

    most, unit = largest(keeps, np.full(len(layouts), float(MOST_BATCH))), units(layouts)
    batch = np.stack([most, most // unit * unit])
    rows, index = np.nonzero(batch > 0)
    kept, batch = layouts.take(index), batch[rows, index]
    needed = use.memory_bytes(kept, batch, 0.0)
    return Points(index, batch, kept.world_size, use.token_seconds(kept, batch), needed)


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
