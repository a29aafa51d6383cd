"""One parameter: its checkpoint tensors, their global shapes and a rank's slices. No torch."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor of `shape`, of which a rank keeps `slices` (one range per dim)."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(items) for items in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A local tensor under the model's own name: its sources, one after the other along dim 0.

    `exact`: it keeps the checkpoint's dtype.
    """

    name: str
    sources: tuple[Source, ...]
    exact: bool = False

    @property
    def num_elements(self) -> int:
        return sum(prod(map(len, source.slices)) for source in self.sources)
