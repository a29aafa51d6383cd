"""Decode costs of every layout at every batch size that its memory holds, in blocks that a cache holds."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.memory import memory
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds
from longhelix.plan.space import Space

_BLOCK = 16384
_MOST_BATCH = 65536


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


def batches(most: int = _MOST_BATCH) -> Array:
    """Batch sizes: every one up to 32, then in steps of a sixteenth."""
    sizes = list(range(1, 33))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + sizes[-1] // 16)
    return np.array([size for size in sizes if size <= most], dtype=np.float64)


def sweep(setting: Setting, space: Space, context: float, batch_sizes: Array | None = None) -> Sweep:
    """Cost every layout at every batch size that its memory holds."""
    sizes = batches() if batch_sizes is None else batch_sizes
    blocks = [_block(setting, space.layouts, index, context, sizes) for index in _blocks(len(space), len(sizes))]
    alone = memory(setting, space.layouts, 1.0, context).total_bytes
    short_bytes = np.maximum(alone - setting.capacity_bytes(space.layouts), 0.0)
    return Sweep(space, _joined(blocks), len(space) * len(sizes), short_bytes)


def _blocks(num_layouts: int, num_sizes: int) -> list[NDArray[np.intp]]:
    """Layouts in runs that with all batch sizes make about _BLOCK configurations."""
    return np.array_split(np.arange(num_layouts), max(1, num_layouts * num_sizes // _BLOCK))


def _block(setting: Setting, layouts: Layouts, index: NDArray[np.intp], context: float, sizes: Array) -> Points:
    """What fits of some layouts (down) with all batch sizes (across)."""
    block = layouts.take(index).as_column()
    needed = memory(setting, block, sizes, context).total_bytes
    fits = needed <= setting.capacity_bytes(block)
    # Batches that no layout of the block holds cost nothing to leave out: memory grows with the batch.
    held = int(fits.any(axis=0).sum())
    ttl_s = decode_seconds(setting, block, sizes[:held], context)
    rows, columns = np.nonzero(fits[:, :held])
    return Points(index[rows], sizes[columns], block.world_size[rows, 0], ttl_s[rows, columns], needed[rows, columns])


def _joined(blocks: list[Points]) -> Points:
    names = [field.name for field in fields(Points)]
    if not blocks:
        return Points(np.zeros(0, dtype=np.intp), *(np.zeros(0) for _ in names[1:]))
    return Points(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in names})


def layouts_of(space: Space, points: Points) -> Layouts:
    return space.layouts.take(points.layout)
