"""MXFP4 of gpt-oss: all experts of a layer in one tensor, with gate and up projections in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from longhelix.compute.models.schemes.microscaling import EXPONENTS
from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

if TYPE_CHECKING:
    from torch import Tensor

_PLACE_OF = {"gate_proj": 0, "up_proj": 1}  # among the rows of gate_up_proj


class GptOssExperts(Scheme):
    """Blocks of 16 bytes with 32 codes, the first in the low half of the first byte, and an exponent for each block."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        fused, _, projection = _fused(module)
        rows = shape[0] * (2 if projection in _PLACE_OF else 1)
        numbers = FORMATS[storage.format].weight_scales.numbers or 1
        scales = (None, rows, blocks(shape[1], numbers))  # the number of experts is not known here
        return {
            f"{fused}_blocks": TensorForm(("uint8",), ((*scales, numbers // 2),)),
            f"{fused}_scales": TensorForm(EXPONENTS, (scales,)),
        }

    def _fill(self, part: Part) -> None:
        fused, expert, projection = _fused(part.prefix.removesuffix("."))
        part = replace(part, prefix=f"{fused}_")
        part.fill_halves(_rows(part, "blocks", expert, projection).flatten(1), part.packed.lead)
        part.fill_scales("scales", _rows(part, "scales", expert, projection))


def _fused(module: str) -> tuple[str, int, str]:
    """Return the name that the tensors of a module begin with, the number of its expert, and its projection."""
    experts, expert, projection = module.rsplit(".", 2)
    return f"{experts}.{'gate_up_proj' if projection in _PLACE_OF else projection}", int(expert), projection


def _rows(part: Part, name: str, expert: int, projection: str) -> Tensor:
    """Return the rows of one expert's projection in a tensor with the blocks of inputs in its third dim."""
    num_experts = part.shape_of(name)[0]
    if expert >= num_experts:
        part.refuse(name, f"has {num_experts} experts, but the model's config requires more")
    step = 2 if projection in _PLACE_OF else 1
    rows = slice(part.rows.start * step, part.rows.stop * step)
    inside = (slice(0, size) for size in part.shape_of(name)[3:])
    rows_1XGB = part.read(name, slice(expert, expert + 1), rows, part.blocks, *inside)
    return rows_1XGB[0, _PLACE_OF.get(projection, 0) :: step]
