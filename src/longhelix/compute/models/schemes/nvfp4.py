"""NVFP4: e2m1 along inputs, a scale in e4m3 for 16 of them, and one in float32 for the tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import SCALAR, Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage


@dataclass(frozen=True)
class NvFp4(Scheme):
    """NVFP4 of one publisher.

    Attributes:
        codes: Name of the tensor with codes.
        tensor_scale: Name of the tensor's scale.
        divides: Numbers are divided by the tensor's scale, not multiplied.
        input_scale: See `Scheme`.
    """

    codes: str
    tensor_scale: str
    divides: bool
    input_scale: str

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, depth = shape
        scales = (outputs, blocks(depth, FORMATS[storage.format].weight_scales.numbers or 1))
        return {
            f"{module}.{self.codes}": TensorForm(("uint8",), ((outputs, blocks(depth, 2)),)),
            f"{module}.weight_scale": TensorForm(("float8_e4m3fn",), (scales,)),
            f"{module}.{self.tensor_scale}": TensorForm(("float32",), SCALAR),
            f"{module}.{self.input_scale}": TensorForm(("float32",), SCALAR, required=False),
        }

    def _fill(self, part: Part) -> None:
        part.fill_halves(part.read(self.codes, part.rows, part.spanned(part.inputs, 2)), part.inputs.start % 2)
        # A block has the scale 0 if its numbers are tiny compared with the others of the tensor.
        part.fill_scales("weight_scale", part.read("weight_scale", part.rows, part.blocks), zero=True)
        part.fill_output_scale(self.tensor_scale, divides=self.divides)
