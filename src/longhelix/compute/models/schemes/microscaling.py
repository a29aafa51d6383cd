"""MXFP4 and MXFP8 of compressed-tensors and modelopt: codes along inputs, and an exponent for 32 of them."""

from collections.abc import Mapping

from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

EXPONENTS = ("uint8", "float8_e8m0fnu")


class MxFp4(Scheme):
    """Two codes in a byte, the first in the low half."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        codes = TensorForm(("uint8",), ((shape[0], blocks(shape[1], 2)),))
        return {f"{module}.weight_packed": codes, f"{module}.weight_scale": _scales(shape, storage.format)}

    def _fill(self, part: Part) -> None:
        part.fill_halves(part.read("weight_packed", part.rows, part.spanned(part.inputs, 2)), part.inputs.start % 2)
        part.fill_scales("weight_scale", part.read("weight_scale", part.rows, part.blocks))


class MxFp8(Scheme):
    """A code in a byte."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        codes = TensorForm(("float8_e4m3fn",), (shape,))
        return {f"{module}.weight": codes, f"{module}.weight_scale": _scales(shape, storage.format)}

    def _fill(self, part: Part) -> None:
        part.fill_codes(part.read("weight", part.rows, part.inputs))
        part.fill_scales("weight_scale", part.read("weight_scale", part.rows, part.blocks))


def _scales(shape: tuple[int, int], format: str) -> TensorForm:
    return TensorForm(EXPONENTS, ((shape[0], blocks(shape[1], FORMATS[format].weight_scales.numbers or 1)),))
