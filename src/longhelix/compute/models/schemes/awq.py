"""AWQ (version gemm): unsigned integers of four bits, packed along outputs into 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

if TYPE_CHECKING:
    from torch import Tensor

_IN_WORD = 8
# Where each of the eight outputs of a word is: a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(Scheme):
    """AutoAWQ's form. Groups are along inputs."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, depth = shape
        group, codes = FORMATS[storage.format].weight_scales.numbers, FORMATS[storage.format].codes
        assert group is not None
        assert codes is not None
        words, groups = blocks(outputs, _IN_WORD), blocks(depth, group)
        forms = {
            f"{module}.qweight": TensorForm(("int32",), ((depth, words),)),
            f"{module}.scales": TensorForm((codes.scale,), ((groups, outputs),)),
        }
        if codes.zero_points:
            forms[f"{module}.qzeros"] = TensorForm(("int32",), ((groups, words),))
        return forms

    def _fill(self, part: Part) -> None:
        words = part.spanned(part.rows, _IN_WORD)
        part.fill_halves(_pairs(part.read("qweight", part.inputs, words))[_rows(part)], 0)
        part.fill_scales("scales", part.read("scales", part.blocks, part.rows).T, negative=True)
        if part.packed.codes.zero_points:
            part.fill_zeros(_codes(part.read("qzeros", part.blocks, words).T)[_rows(part)])


def _rows(part: Part) -> slice:
    """Return the part's rows among the rows of its words."""
    first = part.rows.start % _IN_WORD
    return slice(first, first + part.packed.outputs)


def _codes(words_WX: Tensor) -> Tensor:
    """Return the codes (8 W, X) of words, in order and each in a byte."""
    import torch

    return torch.stack([(words_WX >> 4 * place & 15).to(torch.uint8) for place in _PLACES], dim=1).flatten(0, 1)


def _pairs(words_IW: Tensor) -> Tensor:
    """Return the codes (8 W, I / 2) of words, in order and two in a byte."""
    from torch.nn.functional import pad

    words_IW = pad(words_IW, (0, 0, 0, words_IW.shape[0] % 2))
    # Transposed first, because words in rows are fast to take apart.
    return _codes(words_IW[::2].T.contiguous()) | _codes(words_IW[1::2].T.contiguous()) << 4
