"""Cost decoding for all layouts and all batch sizes that fit in memory, in blocks that fit in the CPU's cache."""

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

    layout: NDArray[np.intp]  # index in the space
    batch: Array  # requests on all GPUs together
    gpus: Array
    ttl_s: Array
    memory_bytes: Array  # on the fullest GPU

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
    configurations: int  # how many were looked at
    short_bytes: Array  # memory that each layout of the space lacks for one request; 0 if it fits


def units(layouts: Layouts) -> Array:
    """The number of requests that gives one to every stage and to every group that has its own requests.

    A batch takes about as long as the next multiple of this: exactly for stages, while for groups the attention does
    and the FFN takes slightly less.
    """
    return layouts.pp * layouts.dp


def batches(most: int = MOST_BATCH) -> Array:
    """Batch sizes up to `most`: all up to 32, then in steps of 1/16."""
    sizes = list(range(1, 33))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 16)
    return np.array([size for size in sizes if size <= most], dtype=np.float64)


def sweep(
    setting: Setting, space: Space, context: float, batch_sizes: Array, seconds: DecodeSeconds = token_seconds
) -> Sweep:
    """Cost all layouts at all batch sizes that fit in memory.

    Args:
        context: tokens of each request.
        batch_sizes: requests on all GPUs together.
        seconds: the time of a decoded token.
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
    """Cost all layouts at `units` times each of the sizes, if they fit in memory."""
    return _sweep(use, space=space, sizes=batch_sizes, units=units(space.layouts), budgets_s=[])


def full_sweep(use: ServiceLoad, space: Space, budgets_s: Sequence[float]) -> Sweep:
    """Cost all layouts at all batch sizes that matter.

    These are `units` times each of `batches`, the largest batch that fits in memory, and the largest one within each
    TTL of `budgets_s`.
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
    """Indices of layouts, in blocks of about _BLOCK configurations each."""
    return np.array_split(np.arange(num_layouts), max(1, num_layouts * num_sizes // _BLOCK))


def _block(
    use: ServiceLoad, layouts: Layouts, index: NDArray[np.intp], sizes: Array, units: Array, seconds: DecodeSeconds
) -> Points:
    """The configurations that fit, of some layouts (rows) with all batch sizes (columns)."""
    block = layouts.take(index).as_column()
    sizes = np.multiply.outer(units[index], sizes)
    needed = use.memory_bytes(block, sizes, 0.0)
    fits = needed <= use.setting.capacity_bytes(block)
    # Memory grows with the batch, so the columns that fit in no layout are the last ones.
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
    """Each layout with the largest batch that fits in memory and within the TTL, and with the largest in whole units.

    Leaves out layouts that serve no request.
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
    """The largest integers up to `most` for which `keeps` holds, by bisection; 0 if it never holds.

    Args:
        keeps: if it holds for a number, it must hold for all smaller ones.
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


def layouts_of(space: Space, points: Points) -> Layouts:
    return space.layouts.take(points.layout)
