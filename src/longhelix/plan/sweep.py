"""Estimate decoding for all layouts and batch sizes that fit in memory, in blocks that fit in the CPU cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.setting import Setting
from longhelix.perf.step import token_seconds
from longhelix.plan.service import ServiceLoad
from longhelix.plan.space import Space

_BLOCK = 16384
MOST_BATCH = 65536
DecodeSeconds = Callable[[Setting, Layouts, Array, float], Array]  # arguments: setting, layouts, batches, context


@dataclass(frozen=True)
class Points:
    """Configurations that fit in memory, arrays (n,)."""

    layout: NDArray[np.intp]  # index of the layout in the space
    batch: Array  # number of requests on all GPUs together
    gpus: Array
    ttl_s: Array
    memory_bytes: Array  # memory use of the fullest GPU

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
    """The result of a sweep."""

    space: Space
    points: Points  # all configurations that fit
    configurations: int  # number of evaluated configurations
    short_bytes: Array  # memory that each layout lacks for one request; 0 if the request fits


def units(layouts: Layouts) -> Array:
    """Return the number of requests that gives one request to every pipeline stage of every data-parallel group.

    If a batch is rounded up to a multiple of this number, the time of a step hardly changes. Pipeline stages take the
    same time. With data-parallel groups, attention takes the same time, and the FFN takes slightly longer.
    """
    return layouts.pp * layouts.dp


def batches(most: int = MOST_BATCH) -> Array:
    """Return batch sizes up to `most`: all sizes up to 32, then sizes that grow by 1/16 each."""
    sizes = list(range(1, 33))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 16)
    return np.array([size for size in sizes if size <= most], dtype=np.float64)


def sweep(
    setting: Setting, space: Space, context: float, batch_sizes: Array, seconds: DecodeSeconds = token_seconds
) -> Sweep:
    """Estimate all layouts with all batch sizes that fit in memory.

    Args:
        context: tokens per request.
        batch_sizes: numbers of requests on all GPUs together.
        seconds: function that returns the time per decoded token.
    """
    return _sweep(
        ServiceLoad(setting, int(context)),
        space=space,
        sizes=batch_sizes,
        units=space.layouts.ones,
        budgets_s=[],
        seconds=seconds,
    )


def unit_sweep(use: ServiceLoad, space: Space, batch_sizes: Array) -> Sweep:
    """Estimate all layouts with each batch size multiplied by the layout's `units`, if this batch fits in memory."""
    return _sweep(use, space=space, sizes=batch_sizes, units=units(space.layouts), budgets_s=[])


def full_sweep(use: ServiceLoad, space: Space, budgets_s: Sequence[float]) -> Sweep:
    """Estimate all layouts with all relevant batch sizes.

    For each layout, these are all sizes of `batches` multiplied by its `units`, the largest batch that fits in memory,
    and the largest batch that meets each TTL of `budgets_s`.
    """
    return _sweep(use, space=space, sizes=batches(), units=units(space.layouts), budgets_s=[np.inf, *budgets_s])


def _sweep(
    use: ServiceLoad,
    space: Space,
    sizes: Array,
    units: Array,
    budgets_s: Sequence[float],
    seconds: DecodeSeconds = token_seconds,
) -> Sweep:
    blocks = [
        _block(use, layouts=space.layouts, index=index, sizes=sizes, units=units, seconds=seconds)
        for index in _blocks(len(space), len(sizes))
    ]
    blocks += [_fullest(use, space.layouts, budget_s) for budget_s in budgets_s]
    alone = use.memory_bytes(space.layouts, 1.0, 0.0)
    short_bytes = np.maximum(alone - use.setting.capacity_bytes(space.layouts), 0.0)
    return Sweep(space, _joined(blocks), len(space) * (len(sizes) + len(budgets_s)), short_bytes)


def _blocks(num_layouts: int, num_sizes: int) -> list[NDArray[np.intp]]:
    """Return indices of layouts in blocks of about _BLOCK configurations."""
    return np.array_split(np.arange(num_layouts), max(1, num_layouts * num_sizes // _BLOCK))


def _block(
    use: ServiceLoad, layouts: Layouts, index: NDArray[np.intp], sizes: Array, units: Array, seconds: DecodeSeconds
) -> Points:
    """Return the configurations of some layouts (rows) and all batch sizes (columns) that fit in memory."""
    block = layouts.take(index).as_column()
    sizes = np.multiply.outer(units[index], sizes)
    needed = use.memory_bytes(block, sizes, 0.0)
    fits = needed <= use.setting.capacity_bytes(block)
    # Memory grows with the batch, so batch sizes that fit in no layout are in the last columns.
    held = int(fits.any(axis=0).sum())
    ttl_s = seconds(use.setting, block, sizes[:, :held], use.kv_tokens)
    rows, columns = np.nonzero(fits[:, :held])
    return Points(
        layout=index[rows],
        batch=sizes[rows, columns],
        gpus=block.world_size[rows, 0],
        ttl_s=ttl_s[rows, columns],
        memory_bytes=needed[rows, columns],
    )


def _fullest(use: ServiceLoad, layouts: Layouts, budget_s: float) -> Points:
    """Return each layout with its largest batch within memory and TTL, and with this batch rounded down to its unit.

    Batches of 0 requests are omitted.
    """

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
    return Points(
        layout=index, batch=batch, gpus=kept.world_size, ttl_s=use.token_seconds(kept, batch), memory_bytes=needed
    )


def largest(keeps: Callable[[Array], Mask], most: Array) -> Array:
    """Find the largest integers up to `most` for which `keeps` is true, by bisection; 0 if it is never true.

    Args:
        keeps: condition. If it is true for a number, it must be true for all smaller numbers.
    """
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
