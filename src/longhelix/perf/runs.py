"""Layers of a stage: a stage is a run of layers, and the model's pattern says which are of which kind."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from longhelix.perf.layouts import Array

Kind = TypeVar("Kind", bound=Hashable)


class Runs(Generic[Kind]):
    """The kinds of a model's layers, and how many of each kind are in any run of layers."""

    def __init__(self, layers: Sequence[Kind]) -> None:
        """layers: the kind of each layer."""
        self.kinds = tuple(dict.fromkeys(layers))
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        is_kind_LK = np.eye(len(self.kinds))[[numbers[layer] for layer in layers]]
        self._before = np.concatenate([np.zeros((1, len(self.kinds))), is_kind_LK.cumsum(axis=0)])

    def _counts(self, length: int) -> Array:
        """Layers of each kind in each run of a length: (runs, kinds)."""
        counts: Array = self._before[length:] - self._before[: len(self._before) - length]
        return counts

    def shared_out(self, kinds: Sequence[Kind], lengths: Array) -> list[Array]:
        """How many layers of each kind stages of these lengths have.

        The first kind has as many layers as it has in any run of that length, the next one as many of those left, and
        so on.

        Args:
            kinds: all kinds, in the order in which they are counted.
            lengths: layers of a stage.
        """
        most = {length: self._counts(int(length)).max(axis=0) for length in np.unique(lengths)}
        left, found = lengths, list[Array]()
        for kind in kinds:
            of_kind = np.vectorize({length: counts[self.kinds.index(kind)] for length, counts in most.items()}.get)
            found.append(np.minimum(of_kind(lengths), left))
            left = left - found[-1]
        return found

    def most_held(self, amounts: Mapping[Kind, Array], lengths: Array) -> Array:
        """The most that any run of these lengths holds. amounts: what a layer of each kind holds."""
        most = np.zeros_like(lengths)
        for length in np.unique(lengths):
            runs = np.unique(self._counts(int(length)), axis=0)
            held = [sum(count * amounts[kind] for count, kind in zip(run, self.kinds, strict=True)) for run in runs]
            most = np.where(lengths == length, np.maximum.reduce(held), most)
        return most
