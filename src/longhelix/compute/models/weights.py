"""Loads parameters: reads each one when the model takes it, and slices and arranges it at the same time.

So a rank never has the whole model in memory, nor its own share twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm, prod

import torch
from torch import Tensor

from longhelix.compute.kernels import PANELS, Weight, native
from longhelix.compute.kernels.weight import WeightArrangement, choose_arrangement
from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.parameter import Parameter, Source

# Elements read at a time: few enough for smooth progress, many enough for all threads.
_PIECE_ELEMENTS = 4 * 2**20


class Weights:
    """A rank's parameters, by name. Each can be taken once.

    Args:
        dtype: Dtype of parameters that are not weights of products.
        weight_dtype: Number format of the weights of products.
        progress: Called with the number of elements read since the last call.
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
        self._unused = {parameter.name: parameter for parameter in parameters}
        self._device = device
        self._progress = progress

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the parameters that were not taken yet."""
        return tuple(self._unused)

    def take(self, name: str) -> Tensor:
        """Return a parameter as a tensor in `dtype`, or in the dtype of the checkpoint if it is exact.

        Weights that a checkpoint has minus one are float32.
        """
        parameter = self._unused.pop(name)
        tensor = None
        for first, rows in self._pieces(parameter):
            if tensor is None:
                dtype = rows.dtype if parameter.exact else torch.float32 if parameter.plus_one else self.dtype
                tensor = torch.empty(parameter.local_shape, dtype=dtype, device=self._device)
            tensor[first : first + len(rows)] = rows
            self._progress(rows.numel())
        assert tensor is not None
        return tensor.add_(1) if parameter.plus_one else tensor

    def find(self, name: str) -> Tensor | None:
        """Return a parameter as a tensor, or None if the model does not have it."""
        return self.take(name) if name in self._unused else None

    def arrangement(self, names: Iterable[str]) -> WeightArrangement:
        """Return the first arrangement that can hold all these weights. Raises UserError if there is none."""
        shapes = (self._unused[name].local_shape for name in names)
        return choose_arrangement(shapes, self.weight_dtype, self._device)

    def product(self, name: str, halves: int = 1, arrangement: WeightArrangement | None = None) -> Weight:
        """Return the weight of a product. halves: see `make_weight`. arrangement: None for the first possible one."""
        if (arrangement or self.arrangement([name])) is not PANELS:
            return self.lay_out(self.take(name), halves, arrangement)
        parameter = self._unused.pop(name)
        weight = PANELS.new_panels(*parameter.local_shape, self.weight_dtype, halves)
        for first, rows in self._pieces(parameter):
            PANELS.write(rows, first, weight, halves)
            self._progress(rows.numel())
        return weight

    def lay_out(self, weight_OI: Tensor, halves: int = 1, arrangement: WeightArrangement | None = None) -> Weight:
        """Arrange a tensor that was taken as the weight of a product."""
        shape_OI = weight_OI.shape[0], weight_OI.shape[1]
        chosen = arrangement or choose_arrangement([shape_OI], self.weight_dtype, self._device)
        return chosen.new_weight(weight_OI, self.weight_dtype, halves)

    def _pieces(self, parameter: Parameter) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces of a parameter in the checkpoint's dtype: the index of the first row, and the rows."""
        first = 0
        for source in parameter.sources:
            for slices in _pieces_of(source):
                yield first, self._checkpoint.read(source.name, slices)
                first += slices[0].stop - slices[0].start


def _pieces_of(source: Source) -> Iterator[tuple[slice, ...]]:
    """Split a source into pieces of whole panels that do not separate rows of a unit."""
    rows, *columns = source.slices
    width = prod(map(len, columns))
    multiple = lcm(source.row_unit, native.LANES)
    step = max(_PIECE_ELEMENTS // max(width, 1) // multiple, 1) * multiple
    column_slices = tuple(slice(items.start, items.stop) for items in columns)
    for start in range(rows.start, rows.stop, step) or (rows.start,):
        yield slice(start, min(start + step, rows.stop)), *column_slices
