"""One parameter: its checkpoint tensors, their global shapes, and this rank's slices of them. No torch."""

from dataclasses import dataclass
from math import prod

from longhelix.spec.weights import WeightDtype


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor of `shape`, of which a rank keeps `slices` (one range per dim). Its rows are read in whole
    units of `row_unit`: a head's, or single ones."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]
    row_unit: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(items) for items in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A tensor of this rank, by the model's own name for it. It consists of its sources, one after the other along dim
    0.

    `exact`: it is loaded in the dtype of the checkpoint. `stored`: the dtype that it is then kept in.
    """

    name: str
    sources: tuple[Source, ...]
    exact: bool = False
    stored: WeightDtype = WeightDtype.ACTIVATION

    @property
    def local_shape(self) -> tuple[int, ...]:
        rows = sum(source.local_shape[0] for source in self.sources)
        return (rows, *self.sources[0].local_shape[1:])

    @property
    def num_elements(self) -> int:
        return sum(prod(map(len, source.slices)) for source in self.sources)
