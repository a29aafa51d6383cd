"""One parameter: its checkpoint tensors, their global shapes, and this rank's slices of them. No torch."""

from dataclasses import dataclass
from math import prod

from longhelix.spec.weights import WeightDtype


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, and the part of it that a rank keeps."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]  # one range per dim
    row_unit: int = 1  # rows that are read together, such as those of a head

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(items) for items in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A tensor of this rank: its sources, concatenated along dim 0."""

    name: str  # in the model
    sources: tuple[Source, ...]
    exact: bool = False  # loaded in the dtype of the checkpoint
    stored: WeightDtype = WeightDtype.ACTIVATION  # dtype in memory
    plus_one: bool = False  # the sources have the weight minus one

    @property
    def local_shape(self) -> tuple[int, ...]:
        rows = sum(source.local_shape[0] for source in self.sources)
        return (rows, *self.sources[0].local_shape[1:])

    @property
    def num_elements(self) -> int:
        return sum(prod(map(len, source.slices)) for source in self.sources)
