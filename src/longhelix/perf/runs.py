"""Layers of one kind in a stage: a stage is a run of layers, and the model's pattern says which are of the kind."""

from collections.abc import Iterable

import numpy as np

from longhelix.perf.layouts import Array


def most_in_runs(chosen: Iterable[bool]) -> Array:
    """The most chosen ones of any n consecutive layers, for n from 0 to all of them: (L + 1,)."""
    before = np.concatenate([[0.0], np.cumsum([float(each) for each in chosen])])
    return np.array([(before[length:] - before[: len(before) - length]).max() for length in range(len(before))])
