"""How checkpoints store quantised weights: the forms that people publish, each with a reader.

The front process checks tensors with them, so only readers import torch.
"""

from collections.abc import Mapping

import msgspec

from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.schemes.awq import Awq
from longhelix.compute.models.schemes.float8 import Float8, Float8Blocks
from longhelix.compute.models.schemes.gguf import Gguf
from longhelix.compute.models.schemes.gpt_oss import GptOssExperts
from longhelix.compute.models.schemes.gptq import Gptq
from longhelix.compute.models.schemes.integer8 import Integer8
from longhelix.compute.models.schemes.microscaling import MxFp4, MxFp8
from longhelix.compute.models.schemes.nvfp4 import NvFp4
from longhelix.compute.models.schemes.pack_quantized import PackQuantized
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm
from longhelix.spec import FORMATS
from longhelix.spec.quantisation import Storage

__all__ = ["SCHEMES", "Scheme", "TensorForm", "with_stored_scales"]

SCHEMES: Mapping[str, Scheme] = {
    "awq": Awq(),
    "float_quantized_block": Float8Blocks("weight_scale", "input_scale"),
    "fp8": Float8("weight_scale", "input_scale"),
    "fp8_block": Float8Blocks("weight_scale_inv", "activation_scale"),
    "fp8_inverse": Float8("weight_scale_inv", "activation_scale"),
    "gguf": Gguf(),
    "gpt_oss": GptOssExperts(),
    "gptq": Gptq(zero_offset=1),
    "gptq_v2": Gptq(zero_offset=0),
    "int_quantized": Integer8(),
    "modelopt_nvfp4": NvFp4("weight", "weight_scale_2", divides=False, input_scale="input_scale"),
    "mxfp4_pack_quantized": MxFp4(),
    "mxfp8_quantized": MxFp8(),
    "nvfp4_pack_quantized": NvFp4(
        "weight_packed", "weight_global_scale", divides=True, input_scale="input_global_scale"
    ),
    "pack_quantized": PackQuantized(),
}


def with_stored_scales(
    storage: Storage, tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, int]
) -> Storage:
    """Return `storage` in the format with the scales that the checkpoint has.

    Scales of integers in groups are in bfloat16 or float16, which configs do not say. GGUF files say it.
    """
    if storage.scheme == "gguf":
        return storage
    name = storage.format.removesuffix("-zero")
    zero = storage.format.removeprefix(name)
    other = (name.removesuffix("-float16") if name.endswith("-float16") else f"{name}-float16") + zero
    for format in (storage.format, other):
        as_format = msgspec.structs.replace(storage, format=format)
        forms = SCHEMES[storage.scheme].tensors(module, shape, as_format) if format in FORMATS else {}
        stored = ((form, tensors[name]) for name, form in forms.items() if name in tensors)
        if forms and all(form.allows(tensor.shape, tensor.dtype) for form, tensor in stored):
            return as_format
    return storage
