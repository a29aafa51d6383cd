"""What a scheme is: the tensors in which checkpoints store a quantised weight, and how they become packed rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.schemes.part import Part
from longhelix.spec.packed_share import packed_share
from longhelix.spec.quantisation import Storage

if TYPE_CHECKING:
    from longhelix.compute.kernels.packed_rows import PackedRows

FLOATS = ("float32", "bfloat16", "float16")
SCALAR = ((), (1,))  # shapes of one number


@dataclass(frozen=True)
class TensorForm:
    """How checkpoints may store a tensor.

    Attributes:
        dtypes: Possible dtypes, by torch's names.
        shapes: Possible shapes. None in a shape: any size.
        required: Whether every checkpoint has the tensor.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    required: bool = True

    def __str__(self) -> str:
        shapes = (f"[{', '.join('any' if size is None else str(size) for size in shape)}]" for shape in self.shapes)
        return f"{_either(self.dtypes)} of shape {_either(tuple(shapes))}"

    def allows(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return whether a tensor of this shape and dtype has this form."""
        return dtype in self.dtypes and any(
            len(shape) == len(known) and all(size in (None, given) for size, given in zip(known, shape, strict=True))
            for known in self.shapes
        )


class Scheme(ABC):
    """A published way to store quantised weights.

    Attributes:
        input_scale: Name of the scale of static activations, which only some checkpoints have.
    """

    input_scale: str = ""

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        """Return the forms of a weight's tensors, by their names in checkpoints.

        Args:
            module: Canonical name of the module.
            shape: (O, I) of the weight.
            storage: How the checkpoint stores it.
        """

    @property
    def order(self) -> str:
        """Name of the tensor with the scale block of each input, if inputs can be ordered."""
        return ""

    def read(
        self,
        checkpoint: Checkpoint,
        module: str,
        shape: tuple[int, int],
        storage: Storage,
        slices: tuple[slice, slice],
    ) -> PackedRows:
        """Return some rows and inputs of a weight. Both may begin and end anywhere, also inside a scale block or byte.

        Whole rows are read if inputs are ordered. The scale of static activations is checked if products round their
        inputs.

        Args:
            checkpoint: It has tensors of the forms that `tensors` returns.
            module: Canonical name of the module.
            shape: (O, I) of the whole weight.
            storage: How the checkpoint stores it.
            slices: Rows and inputs, each as `slice(start, stop)` inside the shape.

        Raises:
            UserError: A scale is not a number, or is zero or negative where that makes no sense. The scale blocks of
                ordered inputs do not have the inputs that they must have.
        """
        from longhelix.compute.kernels.packed_rows import PackedRows, ordered, repacked

        rows, inputs = slices
        outputs = rows.stop - rows.start
        share = packed_share(storage.format, storage.ordered, shape[1], range(inputs.start, inputs.stop))
        read = slice(0, shape[1]) if share.ordered else inputs
        if not (outputs and share.depth):
            return PackedRows.empty(storage.repacked or share.format, outputs, share.depth, share.lead)
        packed = PackedRows.empty(storage.format, outputs, read.stop - read.start, share.lead)
        part = Part(
            checkpoint,
            prefix=f"{module}.",
            shape=shape,
            rows=rows,
            inputs=read,
            packed=packed,
            ordered=share.ordered,
        )
        self._fill(part)
        if storage.input_dtype is not None and part.has(self.input_scale):
            part.check_scales(self.input_scale, part.read_for_outputs(self.input_scale)[:1])
        if storage.repacked is not None:
            return repacked(packed, storage.repacked)
        if not share.ordered:
            return packed
        return ordered(packed, part.groups(self.order), inputs, share.format, share.depth)

    @abstractmethod
    def _fill(self, part: Part) -> None:
        """Fill the rows of a part that is not empty."""


def _either(words: tuple[str, ...]) -> str:
    """Return words such as "a, b or c"."""
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def blocks(size: int, numbers: int) -> int:
    """Return how many blocks of `numbers` have `size` numbers."""
    return -(-size // numbers)
