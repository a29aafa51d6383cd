"""Bytes of one output's weights that a checkpoint packs, where ranks may split scale blocks."""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.spec import FORMATS
from longhelix.spec.layout import HeadShape, Layout, split
from longhelix.spec.weights import Dim, Split

_KEPT = 4096  # results


def row_bytes(setting: Setting, layouts: Layouts, columns: Dim, dtype: str) -> float | Array:
    """Return the bytes that a rank is priced with (`Setting.priced_amount`) for one row with its share of the columns.

    Args:
        setting: The setting.
        layouts: The layouts.
        columns: The weight's second dim.
        dtype: The number format in which the checkpoint packs the weight.
    """
    if columns.split is Split.WHOLE:
        return float(FORMATS[dtype].weight_row_bytes(columns.size))
    if columns.split is Split.OUTPUT_HEADS:
        heads = columns.all_heads
        kvp = layouts.output_ranks / layouts.tpa
        found = _each(lambda tpa, kvp: _of_heads(dtype, heads, columns.unit, tpa, kvp), layouts.tpa, kvp)
    else:
        ranks = layouts.sharers(columns.split)
        found = _each(lambda ranks: _of_items(dtype, columns.count, columns.unit, ranks), ranks)
    return setting.priced_amount(layouts, *found)


def _each(sizes: Callable[..., tuple[float, float]], *degrees: Array) -> list[Array]:
    """Return arrays of the two numbers that `sizes` returns for degrees of parallelism."""
    different, which = np.unique(np.stack([degree.ravel() for degree in degrees]), axis=1, return_inverse=True)
    found = np.array([sizes(*map(int, each)) for each in different.T]).reshape(-1, 2)  # there may be no layouts
    return [values[which.ravel()].reshape(degrees[0].shape) for values in found.T]


@lru_cache(_KEPT)
def _of_items(dtype: str, count: int, unit: int, ranks: int) -> tuple[float, float]:
    """Return the most bytes of a rank, and the mean, of `count` items that are divided among `ranks`."""
    return _most_and_mean(dtype, split(count, min(count, ranks)), unit, ranks)


@lru_cache(_KEPT)
def _of_heads(dtype: str, heads: HeadShape, unit: int, tpa: int, kvp: int) -> tuple[float, float]:
    """Return the same of query heads that each TPA rank divides among its KVP ranks."""
    layout = Layout(kvp=min(kvp, heads.num_query_heads), tpa=tpa)
    pieces = (layout.merged_query_heads(heads, rank) for rank in range(layout.num_ranks))
    return _most_and_mean(dtype, pieces, unit, tpa * kvp)


def _most_and_mean(dtype: str, pieces: Iterable[range], unit: int, ranks: int) -> tuple[float, float]:
    format = FORMATS[dtype]
    numbers = format.weight_scales.numbers or 1
    sizes = [format.weight_row_bytes(len(piece) * unit, piece.start * unit % numbers) for piece in pieces if piece]
    return float(max(sizes)), sum(sizes) / ranks
