"""Cost items of a step: kernels and collectives, and how long each takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.setting import Setting
from longhelix.perf.weights import Amount


@dataclass(frozen=True)
class CostItem:
    """A kernel or collective on the critical path of a step. Fields are arrays over layouts.

    hbm_bytes: bytes that one rank reads and writes. net_bytes: bytes that one rank sends.
    fixed_s: fixed costs of kernels and collectives in `seconds`. compute_bound: arithmetic takes longer than memory.
    """

    name: str
    seconds: Array
    flops: Array
    hbm_bytes: Array
    net_bytes: Array
    fixed_s: Array
    compute_bound: Mask

    def times(self, count: float | Array) -> "CostItem":
        """Return the item `count` times."""
        return CostItem(
            name=self.name,
            seconds=self.seconds * count,
            flops=self.flops * count,
            hbm_bytes=self.hbm_bytes * count,
            net_bytes=self.net_bytes * count,
            fixed_s=self.fixed_s * count,
            compute_bound=self.compute_bound,
        )

    def where(self, mask: Mask) -> "CostItem":
        """Return the item where `mask` holds, and zero cost elsewhere."""
        return self.times(np.where(mask, 1.0, 0.0))


def kernels(
    name: str,
    setting: Setting,
    layouts: Layouts,
    *,
    flops: float | Array = 0.0,
    hbm_bytes: float | Array = 0.0,
    dtype: str = "bfloat16",
    count: float | Array = 1.0,
    compute_efficiency: float | None = None,
) -> CostItem:
    """Return an item of `count` kernels: the longer time of arithmetic and memory, and a fixed cost each (roofline)."""
    efficiency = setting.system.arithmetic.efficiency if compute_efficiency is None else compute_efficiency
    zeros = layouts.zeros
    system, share = setting.system, setting.share(layouts)
    memory_s = hbm_bytes / (system.memory.bytes_per_s * system.memory.efficiency * share)
    compute_s = flops / (system.rate(dtype) * efficiency * share)
    fixed_s = zeros + count * system.fixed.kernel_s
    return CostItem(
        name=name,
        seconds=np.maximum(memory_s, compute_s) + fixed_s,
        flops=zeros + flops,
        hbm_bytes=zeros + hbm_bytes,
        net_bytes=zeros,
        fixed_s=fixed_s,
        compute_bound=compute_s > memory_s,
    )


def product(
    name: str,
    setting: Setting,
    layouts: Layouts,
    amounts: Sequence[Amount],
    rows: float | Array,
    *,
    read: Sequence[Amount] | None = None,
    count: float = 1.0,
) -> CostItem:
    """Return an item of products of `rows` with weights, in `count` kernels. Each number format computes by itself.

    read: The amounts of weights that are read, if these are not `amounts`.
    """
    items = [
        kernels(
            name,
            setting,
            layouts,
            flops=2 * rows * weights.numbers,
            hbm_bytes=moved.bytes,
            dtype=weights.dtype,
            count=0.0 if number else count,
        )
        for number, (weights, moved) in enumerate(zip(amounts, amounts if read is None else read, strict=True))
    ]
    return merged(name, items)


def sends(name: str, seconds: Array, net_bytes: Array, fixed_s: Array) -> CostItem:
    """Return an item of a collective or a send."""
    zeros = np.zeros_like(seconds)
    return CostItem(
        name=name,
        seconds=seconds,
        flops=zeros,
        hbm_bytes=zeros,
        net_bytes=net_bytes,
        fixed_s=fixed_s,
        compute_bound=np.zeros_like(seconds, dtype=np.bool_),
    )


def merged(name: str, items: Sequence[CostItem]) -> CostItem:
    """Return the sum of items, which run one after another."""
    if len(items) == 1:
        return items[0]

    def total(field: str) -> Array:
        total: Array = sum(getattr(item, field) for item in items)
        return total

    return CostItem(
        name=name,
        seconds=total("seconds"),
        flops=total("flops"),
        hbm_bytes=total("hbm_bytes"),
        net_bytes=total("net_bytes"),
        fixed_s=total("fixed_s"),
        compute_bound=reduce(np.logical_or, (item.compute_bound for item in items)),
    )


def total_seconds(items: Iterable[CostItem]) -> Array:
    # numpy's own sum has another order of additions, and so other bits, for one layout than for many.
    return sum((item.seconds for item in items), np.zeros(1))
