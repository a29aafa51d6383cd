"""Counts of the different kinds of layers in a pipeline stage, which is a run of consecutive layers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from longhelix.perf.layouts import Array

Kind = TypeVar("Kind", bound=Hashable)


class Runs(Generic[Kind]):
    """Counts the layers of each kind in runs of consecutive layers of a model."""

    def __init__(self, layers: Sequence[Kind]) -> None:
        """layers: the kind of each layer."""
        self.kinds = tuple(dict.fromkeys(layers))
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        is_kind_LK = np.eye(len(self.kinds))[[numbers[layer] for layer in layers]]
        self._before = np.concatenate([np.zeros((1, len(self.kinds))), is_kind_LK.cumsum(axis=0)])

    def fullest(self, amounts: Mapping[Kind, Array], lengths: Array) -> dict[Kind, Array]:
        """Count the layers of each kind in the run with the largest total.

        Args:
            amounts: The amount of a layer of each kind.
            lengths: Number of layers of the run.
        """
        counts = {kind: np.zeros_like(lengths) for kind in self.kinds}
        for length in np.unique(lengths):
            runs_RK = np.unique(self._before[int(length) :] - self._before[: len(self._before) - int(length)], axis=0)
            totals = [
                sum(count * amounts[kind] for count, kind in zip(run, self.kinds, strict=True)) for run in runs_RK
            ]
            fullest = np.argmax(np.stack([total + np.zeros_like(lengths) for total in totals]), axis=0)
            for number, kind in enumerate(self.kinds):
                counts[kind] = np.where(lengths == length, runs_RK[fullest, number], counts[kind])
        return counts

    def largest_total(self, amounts: Mapping[Kind, Array], lengths: Array) -> Array:
        """Return the largest total of any run of these lengths. amounts: the amount of a layer of each kind."""
        counts = self.fullest(amounts, lengths)
        return sum((counts[kind] * amounts[kind] for kind in self.kinds), np.zeros_like(lengths))
