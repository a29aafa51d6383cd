"""Bytes of weights that a checkpoint packs, where ranks may split scale blocks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.stored_layers import StoredWeight
from longhelix.spec.layout import Layout, split
from longhelix.spec.packed_share import PackedShare, packed_share
from longhelix.spec.weights import Dim, Split

_KEPT = 4096  # results

Size = Callable[[PackedShare], int]


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a packed weight.

    Attributes:
        columns: The weight's second dim.
        dtype: The number format in which the checkpoint packs the weight.
        ordered: See `StoredWeight`.
    """

    columns: Dim
    dtype: str
    ordered: bool

    def share(self, items: range) -> PackedShare:
        """Return how a rank keeps some items of the columns."""
        unit = self.columns.unit
        inputs = range(items.start * unit, items.stop * unit)
        return packed_share(self.dtype, self.ordered, self.columns.size, inputs)


def row_bytes(setting: Setting, layouts: Layouts, weight: StoredWeight) -> float | Array:
    """Return the bytes that a rank is priced with (`Setting.priced_amount`) for one row with its share of the columns.

    Args:
        setting: The setting.
        layouts: The layouts.
        weight: A packed matrix.
    """
    return _priced(setting, layouts, weight, _row_bytes)


def order_bytes(setting: Setting, layouts: Layouts, weight: StoredWeight) -> float | Array:
    """Return the bytes that a rank is priced with for the order of its share of the columns. Arguments: as above."""
    return _priced(setting, layouts, weight, _order_bytes) if weight.has_order else 0.0


def _row_bytes(share: PackedShare) -> int:
    return share.row_bytes


def _order_bytes(share: PackedShare) -> int:
    return share.order_bytes


def _priced(setting: Setting, layouts: Layouts, weight: StoredWeight, size: Size) -> float | Array:
    columns = weight.spec.columns
    assert columns is not None
    inputs = _Inputs(columns, weight.dtype, weight.ordered)
    if columns.split is Split.WHOLE:
        return float(size(inputs.share(range(columns.count))))
    if columns.split is Split.OUTPUT_HEADS:
        kvp = layouts.output_ranks / layouts.tpa
        found = _each(lambda tpa, kvp: _of_heads(size, inputs, tpa, kvp), layouts.tpa, kvp)
    else:
        ranks = layouts.sharers(columns.split)
        found = _each(lambda ranks: _of_items(size, inputs, ranks), ranks)
    return setting.priced_amount(layouts, *found)


def _each(sizes: Callable[..., tuple[float, float]], *degrees: Array) -> list[Array]:
    """Return arrays of the two numbers that `sizes` returns for degrees of parallelism, which are small integers."""
    shape = tuple(int(degree.max(initial=0)) + 1 for degree in degrees)
    keys = np.ravel_multi_index([degree.astype(np.int64) for degree in degrees], shape)
    # Counted, because sorting the keys of all layouts takes longer than everything else here.
    different = np.flatnonzero(np.bincount(keys.ravel(), minlength=1))
    by_key = np.zeros((2, int(different[-1]) + 1 if len(different) else 1))
    for key, each in zip(different, zip(*np.unravel_index(different, shape), strict=True), strict=True):
        by_key[:, key] = sizes(*map(int, each))
    return [values[keys] for values in by_key]


@lru_cache(_KEPT)
def _of_items(size: Size, inputs: _Inputs, ranks: int) -> tuple[float, float]:
    """Return the most bytes of a rank, and the mean, of items that are divided among `ranks`."""
    count = inputs.columns.count
    return _most_and_mean(size, inputs, split(count, min(count, ranks)), ranks)


@lru_cache(_KEPT)
def _of_heads(size: Size, inputs: _Inputs, tpa: int, kvp: int) -> tuple[float, float]:
    """Return the same of query heads that each TPA rank divides among its KVP ranks."""
    heads = inputs.columns.all_heads
    layout = Layout(kvp=min(kvp, heads.num_query_heads), tpa=tpa)
    pieces = (layout.merged_query_heads(heads, rank) for rank in range(layout.num_ranks))
    return _most_and_mean(size, inputs, pieces, tpa * kvp)


def _most_and_mean(size: Size, inputs: _Inputs, pieces: Iterable[range], ranks: int) -> tuple[float, float]:
    sizes = [size(inputs.share(piece)) for piece in pieces if piece]
    return float(max(sizes)), sum(sizes) / ranks
