"""FP8 weights: a tensor in e4m3, and scales of the whole tensor, of its outputs, or of blocks of 128 x 128."""

from collections.abc import Mapping
from dataclasses import dataclass

from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import FLOATS, SCALAR, Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

_CODES = ("float8_e4m3fn",)
_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Float8(Scheme):
    """One scale for the tensor, or one for each output.

    Attributes:
        scale: Name of the tensor with scales.
        input_scale: See `Scheme`.
    """

    scale: str
    input_scale: str

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, _ = shape
        return {
            f"{module}.weight": TensorForm(_CODES, (shape,)),
            f"{module}.{self.scale}": TensorForm(FLOATS, (*SCALAR, (outputs,), (outputs, 1))),
            f"{module}.{self.input_scale}": TensorForm(FLOATS, SCALAR, required=False),
        }

    def _fill(self, part: Part) -> None:
        part.fill_codes(part.read("weight", part.rows, part.inputs))
        part.fill_scales(self.scale, part.read_for_outputs(self.scale).unsqueeze(1))


@dataclass(frozen=True)
class Float8Blocks(Scheme):
    """One scale for each 128 outputs and 128 inputs. Attributes: see `Float8`."""

    scale: str
    input_scale: str

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        numbers = FORMATS[storage.format].weight_scales.numbers or 1
        rows, columns = blocks(shape[0], _BLOCK_ROWS), blocks(shape[1], numbers)
        # Bytes are exponents, and modelopt writes four dims.
        scales = TensorForm((*FLOATS, "float8_e8m0fnu", "uint8"), ((rows, columns), (rows, 1, columns, 1)))
        return {
            f"{module}.weight": TensorForm(_CODES, (shape,)),
            f"{module}.{self.scale}": scales,
            f"{module}.{self.input_scale}": TensorForm(FLOATS, SCALAR, required=False),
        }

    def _fill(self, part: Part) -> None:
        import torch

        part.fill_codes(part.read("weight", part.rows, part.inputs))
        rows = part.spanned(part.rows, _BLOCK_ROWS)
        dims = len(part.shape_of(self.scale))
        slices = (rows, part.blocks) if dims == 2 else (rows, slice(0, 1), part.blocks, slice(0, 1))
        scales_RG = part.read(self.scale, *slices).flatten(1)
        block_of_row = torch.arange(part.rows.start, part.rows.stop) // _BLOCK_ROWS - rows.start
        part.fill_scales(self.scale, scales_RG[block_of_row])
