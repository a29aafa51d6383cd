"""Loads parameters: reads each one when the model takes it, and slices and arranges it at the same time.

So a rank never has the whole model in memory, nor its own share twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm, prod

import torch
from torch import Tensor

from longhelix.compute.kernels import PANELS, Weight, native
from longhelix.compute.kernels.packed_rows import PackedRows, encoded, joined
from longhelix.compute.kernels.weight import PACKED, WeightArrangement, choose_arrangement
from longhelix.compute.models.checkpoint import Checkpoint, invalid_checkpoint
from longhelix.compute.models.parameter import Parameter, Source
from longhelix.compute.models.schemes import SCHEMES
from longhelix.spec import FORMATS

# Elements read at a time: few enough for smooth progress, many enough for all threads.
_PIECE_ELEMENTS = 4 * 2**20


class Weights:
    """A rank's parameters, by name. Each can be taken once.

    Args:
        dtype: Dtype of parameters that are not weights of products.
        weight_dtype: Number format of the weights of products that the checkpoint does not pack.
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

        Weights of products that stay numbers have their own dtype. Weights that a checkpoint has minus one are float32.
        """
        parameter = self._unused.pop(name)
        storage = parameter.storage
        kept = self.dtype if storage is None or not storage.is_number else getattr(torch, storage.kept)
        tensor = None
        for first, rows in self._pieces(parameter):
            if tensor is None:
                dtype = rows.dtype if parameter.exact else torch.float32 if parameter.plus_one else kept
                tensor = torch.empty(parameter.local_shape, dtype=dtype, device=self._device)
            tensor[first : first + len(rows)] = rows
            self._progress(rows.numel())
        assert tensor is not None
        return tensor.add_(1) if parameter.plus_one else tensor

    def find(self, name: str) -> Tensor | None:
        """Return a parameter as a tensor, or None if the model does not have it."""
        return self.take(name) if name in self._unused else None

    def format(self, name: str) -> str:
        """Return the number format of the weight of a product."""
        return self._unused[name].format(self.weight_dtype)

    def is_packed(self, name: str) -> bool:
        """Return whether the checkpoint packs a parameter, which stays so."""
        storage = self._unused[name].storage
        return storage is not None and not storage.is_number

    def lead(self, name: str) -> int:
        """Return how many inputs of the first scale block of a packed weight belong to another rank."""
        return self._unused[name].lead(self.weight_dtype)

    def arrangement(self, names: Sequence[str]) -> WeightArrangement:
        """Return the first arrangement that can hold all these weights, which have one format.

        Raises:
            UserError: There is none.
        """
        parameters = [self._unused[name] for name in names]
        if any(parameter.storage is not None and parameter.storage.input_dtype == "fp8" for parameter in parameters):
            return PACKED
        shapes = (parameter.product_shape(self.weight_dtype) for parameter in parameters)
        lead = max((parameter.lead(self.weight_dtype) for parameter in parameters), default=0)
        dtype = self.format(names[0]) if names else self.weight_dtype
        return choose_arrangement(shapes, dtype, self._device, lead)

    def product(
        self,
        name: str,
        halves: int = 1,
        arrangement: WeightArrangement | None = None,
        order_O: Tensor | None = None,
    ) -> Weight:
        """Return the weight of a product.

        Args:
            halves: See `make_weight`.
            arrangement: None for the first possible one.
            order_O: The rows of the weight, in order. None: as they are.
        """
        arrangement, dtype = arrangement or self.arrangement([name]), self.format(name)
        share, rounds_inputs = self._unused[name].share(self.weight_dtype), self._unused[name].rounds_inputs
        in_pieces = order_O is None and arrangement is PANELS
        if not in_pieces or (share is not None and (share.ordered or FORMATS[share.format].codes is None)):
            if share is not None:
                rows = self._packed(name)
                rows = rows if order_O is None else rows.selected(order_O)
                arrange = arrangement.of_rows if rows.dtype == share.format else PANELS.of_bytes
                return replace(arrange(rows, halves), rounds_inputs=rounds_inputs)
            weight_OI = self.take(name)
            return self.lay_out(weight_OI if order_O is None else weight_OI[order_O], dtype, halves, arrangement)
        shape_OI, lead = self._unused[name].local_shape, self.lead(name)
        weight = replace(PANELS.new_panels(*shape_OI, dtype, halves, lead), rounds_inputs=rounds_inputs)
        parameter = self._unused.pop(name)
        if share is not None:
            for first, rows in self._packed_pieces(parameter):
                PANELS.write_packed(rows, first, weight, halves)
        else:
            for first, rows in self._pieces(parameter):
                PANELS.write(rows, first, weight, halves)
                self._progress(rows.numel())
        return weight

    def _packed(self, name: str) -> PackedRows:
        """Return a packed parameter as rows."""
        parameter = self._unused.pop(name)
        whole: PackedRows | None = None
        for first, rows in self._packed_pieces(parameter):
            if whole is None or not first:  # a source without rows has no order
                whole = PackedRows.empty(
                    rows.dtype, parameter.local_shape[0], rows.depth, rows.lead, order_I=rows.order_I
                )
            elif rows.outputs:
                _check_orders(parameter, whole, rows)
            for to, section in zip(whole.sections, rows.sections, strict=True):
                to[first : first + rows.outputs] = section
        assert whole is not None
        order_I = None if whole.order_I is None else whole.order_I.to(self._device)
        return PackedRows(whole.buffer.to(self._device), whole.dtype, whole.outputs, whole.depth, whole.lead, order_I)

    def lay_out(
        self, weight_OI: Tensor, dtype: str, halves: int = 1, arrangement: WeightArrangement | None = None
    ) -> Weight:
        """Arrange a tensor that was taken as the weight of a product, in the number format `dtype`."""
        shape_OI = weight_OI.shape[0], weight_OI.shape[1]
        chosen = arrangement or choose_arrangement([shape_OI], dtype, self._device)
        if FORMATS[dtype].codes is None:
            return chosen.new_weight(weight_OI, dtype, halves)
        step = max(_PIECE_ELEMENTS // max(shape_OI[1], 1), 1)
        return chosen.of_rows(joined([encoded(rows, dtype) for rows in weight_OI.split(step)]), halves)

    def _pieces(self, parameter: Parameter) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces of a parameter in the checkpoint's dtype: the index of the first row, and the rows."""
        first = 0
        for source in parameter.sources:
            for slices in _pieces_of(source):
                yield first, self._read(source, slices)
                first += slices[0].stop - slices[0].start

    def _read(self, source: Source, slices: tuple[slice, ...]) -> Tensor:
        """Return a part of a source as numbers."""
        if source.storage is None or source.storage.is_number:
            return self._checkpoint.read(source.name, slices)
        return self._packed_part(source, slices).numbers()

    def _packed_pieces(self, parameter: Parameter) -> Iterator[tuple[int, PackedRows]]:
        """Yield pieces of a packed parameter: the index of the first row, and the rows."""
        first = 0
        for source in parameter.sources:
            # Whole rows are read to be quantised, or to be ordered.
            whole = source.shape[1] if source.storage is None or source.storage.ordered else 0
            for slices in _pieces_of(source, whole):
                rows = self._packed_part(source, slices)
                yield first, rows
                self._progress(prod(part.stop - part.start for part in slices))
                first += rows.outputs

    def _packed_part(self, source: Source, slices: tuple[slice, ...]) -> PackedRows:
        """Return a part of a source as packed rows."""
        rows, inputs = slices
        if source.storage is None and inputs.start == inputs.stop:
            return PackedRows.empty(self.weight_dtype, rows.stop - rows.start, depth=0)
        if source.storage is None:
            # Whole rows are quantised, so that the numbers do not depend on the layout.
            whole_OI = self._checkpoint.read(source.name, (rows, slice(0, source.shape[1])))
            return encoded(whole_OI, self.weight_dtype).cut(inputs)
        scheme, shape = SCHEMES[source.storage.scheme], (source.shape[0], source.shape[1])
        return scheme.read(self._checkpoint, source.module, shape, source.storage, (rows, inputs))


def _check_orders(parameter: Parameter, first: PackedRows, other: PackedRows) -> None:
    """Raise UserError if the sources of a parameter have their inputs in different orders."""
    if first.order_I is None or (other.order_I is not None and torch.equal(first.order_I, other.order_I)):
        return
    names = " and ".join(repr(source.module) for source in parameter.sources)
    raise invalid_checkpoint(
        f"{names} have the same inputs, but order them differently: use a checkpoint that quantises them together, or "
        "one without act-order"
    )


def _pieces_of(source: Source, least_width: int = 0) -> Iterator[tuple[slice, ...]]:
    """Split a source into pieces of whole panels that do not separate rows of a unit.

    least_width: how many elements of a row are read at least.
    """
    rows, *columns = source.slices
    width = max(prod(map(len, columns)), least_width)
    multiple = lcm(source.row_unit, native.LANES)
    step = max(_PIECE_ELEMENTS // max(width, 1) // multiple, 1) * multiple
    column_slices = tuple(slice(items.start, items.stop) for items in columns)
    for start in range(rows.start, rows.stop, step) or (rows.start,):
        yield slice(start, min(start + step, rows.stop)), *column_slices
