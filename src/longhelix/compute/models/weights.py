"""Loading: each parameter is read when the model asks for it, sliced, and laid out while it is read, so a rank never
holds the whole model, nor its share of it twice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm, prod

import torch
from torch import Tensor

from longhelix.compute.kernels import PANELS, Weight, native
from longhelix.compute.kernels.weight import WeightArrangement, choose_arrangement
from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.parameter import Parameter, Source

# Read at a time: few enough that progress is seen to move, many enough for all threads.
_PIECE_ELEMENTS = 4 * 2**20


class Weights:
    """A rank's parameters, by name; each can be taken once.

    dtype: of what is not a product. weight_dtype: the number format of products. progress: called with the elements
    that have been read since it was last called.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parameters: Sequence[Parameter],
        dtype: torch.dtype,
        weight_dtype: str,
        device: torch.device,
        progress: Callable[[int], None] = lambda elements: None,
    ) -> None:
        self.dtype = dtype
        self.weight_dtype = weight_dtype
        self._checkpoint = checkpoint
        self._left = {parameter.name: parameter for parameter in parameters}
        self._device = device
        self._progress = progress

    @property
    def left(self) -> tuple[str, ...]:
        """The names of what was not taken."""
        return tuple(self._left)

    def take(self, name: str) -> Tensor:
        """The tensor, in `dtype`, or as the checkpoint has it where it is exact."""
        parameter = self._left.pop(name)
        taken = None
        for first, rows in self._pieces(parameter):
            if taken is None:
                dtype = rows.dtype if parameter.exact else self.dtype
                taken = torch.empty(parameter.local_shape, dtype=dtype, device=self._device)
            taken[first : first + len(rows)] = rows
            self._progress(rows.numel())
        assert taken is not None
        return taken

    def find(self, name: str) -> Tensor | None:
        """The tensor, or None where the model has none."""
        return self.take(name) if name in self._left else None

    def arrangement(self, names: Iterable[str]) -> WeightArrangement:
        """The first in which all these products can lie. Raises UserError if there is none."""
        shapes = (self._left[name].local_shape for name in names)
        return choose_arrangement(shapes, self.weight_dtype, self._device)

    def product(self, name: str, halves: int = 1, arrangement: WeightArrangement | None = None) -> Weight:
        """The weight of a product, laid out. `halves`: see `make_weight`. `arrangement`: another than the first."""
        if (arrangement or self.arrangement([name])) is not PANELS:
            return self.lay_out(self.take(name), halves, arrangement)
        parameter = self._left.pop(name)
        weight = PANELS.new_panels(*parameter.local_shape, self.weight_dtype, halves)
        for first, rows in self._pieces(parameter):
            PANELS.write(rows, first, weight, halves)
            self._progress(rows.numel())
        return weight

    def lay_out(self, weight_OI: Tensor, halves: int = 1, arrangement: WeightArrangement | None = None) -> Weight:
        """The weight of a product, of a tensor that was taken."""
        shape_OI = weight_OI.shape[0], weight_OI.shape[1]
        chosen = arrangement or choose_arrangement([shape_OI], self.weight_dtype, self._device)
        return chosen.new_weight(weight_OI, self.weight_dtype, halves)

    def _pieces(self, parameter: Parameter) -> Iterator[tuple[int, Tensor]]:
        """Rows of a parameter as the checkpoint has them, with the number of the first."""
        first = 0
        for source in parameter.sources:
            for slices in _pieces_of(source):
                yield first, self._checkpoint.read(source.name, slices)
                first += slices[0].stop - slices[0].start


def _pieces_of(source: Source) -> Iterator[tuple[slice, ...]]:
    """What to read one after the other: whole panels, and rows that belong together."""
    rows, *columns = source.slices
    width = prod(map(len, columns))
    multiple = lcm(source.row_unit, native.LANES)
    step = max(_PIECE_ELEMENTS // max(width, 1) // multiple, 1) * multiple
    others = tuple(slice(items.start, items.stop) for items in columns)
    for start in range(rows.start, rows.stop, step) or (rows.start,):
        yield slice(start, min(start + step, rows.stop)), *others
