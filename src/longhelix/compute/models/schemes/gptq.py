"""GPTQ: unsigned integers of four bits, packed along inputs into 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longhelix.compute.models.checkpoint import invalid_checkpoint
from longhelix.compute.models.schemes.part import Part, column_bytes
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

if TYPE_CHECKING:
    from torch import Tensor

_IN_WORD = 8
_LARGEST = 15
_SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ, with act-order or without.

    Attributes:
        zero_offset: What is added to stored zero points, modulo 16.
    """

    zero_offset: int

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, depth = shape
        group, codes = FORMATS[storage.format].weight_scales.numbers, FORMATS[storage.format].codes
        assert group is not None
        assert codes is not None
        groups = blocks(depth, group)
        return {
            f"{module}.qweight": TensorForm(("int32",), ((blocks(depth, _IN_WORD), outputs),)),
            f"{module}.qzeros": TensorForm(("int32",), ((groups, blocks(outputs, _IN_WORD)),)),
            f"{module}.scales": TensorForm((codes.scale,), ((groups, outputs),)),
            f"{module}.{self.order}": TensorForm(("int32",), ((depth,),), required=False),
        }

    @property
    def order(self) -> str:
        return "g_idx"

    def _fill(self, part: Part) -> None:
        _check_order(part, self.order)
        words_WO = part.read("qweight", part.spanned(part.inputs, _IN_WORD), part.rows)
        part.fill_halves(column_bytes(words_WO), part.inputs.start % _IN_WORD)
        # AutoRound chooses negative scales where the largest number of a group is negative.
        part.fill_scales("scales", part.read("scales", part.blocks, part.rows).T, negative=True)
        zeros_GO = self._zeros(part)
        if part.packed.codes.zero_points:
            part.fill_zeros(zeros_GO.T)
        elif (zeros_GO != _SYMMETRIC_ZERO).any():
            part.refuse("qzeros", "has zero points other than 8, but sym is true in the model's config")

    def _zeros(self, part: Part) -> Tensor:
        """Return zero points (G, O), one in a byte."""
        import torch

        from longhelix.compute.kernels.packed_rows import unpacked

        words_GW = part.read("qzeros", part.blocks, part.spanned(part.rows, _IN_WORD))
        first = part.rows.start % _IN_WORD
        zeros_GO = unpacked(words_GW.view(torch.uint8))[:, first : first + part.packed.outputs]
        return (zeros_GO + self.zero_offset) & _LARGEST


def _check_order(part: Part, order: str) -> None:
    """Raise UserError if inputs are ordered, although the config says that they are not."""
    import torch

    if part.ordered or not part.has(order):
        return
    group = part.packed.format.weight_scales.numbers or 1
    expected_I = torch.arange(part.inputs.start, part.inputs.stop, dtype=torch.int32) // group
    if not torch.equal(part.read(order, part.inputs), expected_I):
        raise invalid_checkpoint(
            f"tensor {part.prefix + order!r} orders inputs by their activations, but desc_act is false in the model's "
            "config: set it to true"
        )
