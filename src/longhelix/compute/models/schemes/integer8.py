"""INT8 weights: a tensor of signed bytes, and scales of the whole tensor or of its outputs."""

from collections.abc import Mapping

from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import FLOATS, SCALAR, Scheme, TensorForm
from longhelix.spec.quantisation import Storage


class Integer8(Scheme):
    """compressed-tensors' int-quantized."""

    input_scale = "input_scale"

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, _ = shape
        return {
            f"{module}.weight": TensorForm(("int8",), (shape,)),
            f"{module}.weight_scale": TensorForm(FLOATS, (*SCALAR, (outputs,), (outputs, 1))),
            f"{module}.{self.input_scale}": TensorForm(FLOATS, SCALAR, required=False),
            f"{module}.input_zero_point": TensorForm(("int8",), SCALAR, required=False),
        }

    def _fill(self, part: Part) -> None:
        part.fill_codes(part.read("weight", part.rows, part.inputs))
        part.fill_scales("weight_scale", part.read_for_outputs("weight_scale").unsqueeze(1))
