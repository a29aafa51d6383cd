"""compressed-tensors' pack-quantized: integers plus half their range, packed along inputs into 32-bit words."""

from collections.abc import Mapping

from longhelix.compute.models.schemes.part import Part, column_bytes
from longhelix.compute.models.schemes.scheme import FLOATS, SCALAR, Scheme, TensorForm, blocks
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

_WORD_BITS = 32
_SIGN = 128  # of bytes: half their range


class PackQuantized(Scheme):
    """Integers of four bits in groups, or of eight bits with a scale for the tensor or for each output."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        outputs, depth = shape
        numbers = FORMATS[storage.format]
        group, codes = numbers.weight_scales.numbers, numbers.codes
        assert codes is not None
        if group is None:
            scales = TensorForm(FLOATS, (*SCALAR, (outputs,), (outputs, 1)))
        else:
            scales = TensorForm((codes.scale,), ((outputs, blocks(depth, group)),))
        forms = {
            f"{module}.weight_packed": TensorForm(("int32",), ((outputs, blocks(depth * numbers.bits, _WORD_BITS)),)),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": TensorForm(("int64", "int32"), ((2,),), required=False),
        }
        if codes.zero_points:
            packed = (blocks(outputs * numbers.bits, _WORD_BITS), scales.shapes[0][1])
            forms[f"{module}.weight_zero_point"] = TensorForm(("int32",), (packed,))
        if storage.ordered:
            forms[f"{module}.{self.order}"] = TensorForm(("int32",), ((depth,),), required=False)
        return forms

    @property
    def order(self) -> str:
        return "weight_g_idx"

    def _fill(self, part: Part) -> None:
        import torch

        from longhelix.compute.kernels.packed_rows import unpacked

        _check_shape(part)
        in_word = _WORD_BITS // part.packed.format.bits
        words_OW = part.read("weight_packed", part.rows, part.spanned(part.inputs, in_word))
        first = part.inputs.start % in_word
        bytes_OX = words_OW.view(torch.uint8)  # words are little-endian: the first integer is in the lowest bits
        if part.packed.codes.element == "int8":
            part.fill_codes(bytes_OX[:, first : first + part.packed.depth] ^ _SIGN)
            part.fill_scales("weight_scale", part.read_for_outputs("weight_scale").unsqueeze(1))
            return
        part.fill_halves(bytes_OX, first)
        # AutoRound chooses negative scales where the largest number of a group is negative.
        part.fill_scales("weight_scale", part.read("weight_scale", part.rows, part.blocks), negative=True)
        if part.packed.codes.zero_points:
            words_WG = part.read("weight_zero_point", part.spanned(part.rows, in_word), part.blocks)
            zeros_GO = unpacked(column_bytes(words_WG))
            first = part.rows.start % in_word
            part.fill_zeros(zeros_GO[:, first : first + part.packed.outputs].T)


def _check_shape(part: Part) -> None:
    if part.has("weight_shape"):
        stored = part.read("weight_shape", slice(0, 2)).tolist()
        if stored != list(part.shape):
            part.refuse("weight_shape", f"is {stored}, but the model's config requires {list(part.shape)}")
