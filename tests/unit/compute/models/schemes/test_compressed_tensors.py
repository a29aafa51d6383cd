"""What the compressors of compressed-tensors write is read as its own decompressors read it.

Its converters, and transformers, read the weights of other publishers.
"""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from published_weights import MODULE, awq, fp8_block, gpt_oss
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.schemes import SCHEMES
from longhelix.spec.quantisation import read_quantisation

pytestmark = pytest.mark.unit

SHAPE = 144, 256
CUTS = [(0, 144, 0, 256), (5, 137, 3, 251), (127, 130, 33, 34), (17, 24, 16, 160)]
BYTES_OF_OUTPUTS = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
GROUPS_OF_32 = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)


def preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, ["Linear"])


def weights_alone(weights: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights)


WRITTEN = {
    "W4A16": (preset("W4A16"), "int4-g128"),
    "W4A16_ASYM": (preset("W4A16_ASYM"), "int4-g128-zero"),
    "INT4 in groups of 32": (weights_alone(GROUPS_OF_32), "int4-g32"),
    "INT8": (preset("INT8"), "int8-channel"),
    "INT8 W8A16": (weights_alone(BYTES_OF_OUTPUTS), "int8-channel"),
    "FP8": (preset("FP8"), "fp8-channel"),
    "FP8_DYNAMIC": (preset("FP8_DYNAMIC"), "fp8-channel"),
    "FP8_BLOCK": (preset("FP8_BLOCK"), "fp8-block"),
    "NVFP4": (preset("NVFP4"), "nvfp4"),
    "NVFP4A16": (preset("NVFP4A16"), "nvfp4"),
    "MXFP4": (preset("MXFP4"), "mxfp4"),
    "MXFP8": (preset("MXFP8"), "mxfp8"),
}


def in_blocks(weight_OI: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the numbers of each scale, in the last dim. Other dims are those of the scales."""
    if args.strategy == "tensor":
        return weight_OI.reshape(1, -1)
    if args.strategy == "channel":
        return weight_OI.unsqueeze(1)
    if args.strategy == "block":
        padded = torch.nn.functional.pad(weight_OI, (0, -SHAPE[1] % 128, 0, -SHAPE[0] % 128))
        return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    return weight_OI.unflatten(1, (-1, args.group_size))


def state_of(scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """Return a weight with its scales, as an observer of llm-compressor chooses them."""
    args = scheme.weights
    generator = torch.Generator().manual_seed(11)
    weight_OI = torch.randn(SHAPE, generator=generator).bfloat16()
    blocks = in_blocks(weight_OI, args)
    state = {"weight": weight_OI}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = torch.tensor([512.0])  # a power of two, so that no order of products rounds
    scale, zero_point = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    return state | {"weight_scale": scale, "weight_zero_point": zero_point}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_written_weights_are_read_as_their_publisher_reads_them(name, tmp_path):
    scheme, number_format = WRITTEN[name]
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    stored = compressor.compress(state_of(scheme), scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form.value, ignore=["lm_head"])
    settings = json.loads(json.dumps(config.model_dump(mode="json")))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": settings}))
    save_file({f"{MODULE}.{key}": each.contiguous() for key, each in stored.items()}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)

    storage = read_quantisation(checkpoint.config).storage_of(MODULE)
    assert storage.format == number_format
    forms = SCHEMES[storage.scheme].tensors(MODULE, SHAPE, storage)
    assert {each for each, its in forms.items() if its.required} <= set(checkpoint.tensors) <= set(forms)
    for tensor in checkpoint.tensors.values():
        assert forms[tensor.name].allows(tensor.shape, tensor.dtype)

    theirs = compressor.decompress(stored, scheme)["weight"]
    for first, last, begin, end in CUTS:
        cut = slice(first, last), slice(begin, end)
        ours = SCHEMES[storage.scheme].read(checkpoint, MODULE, SHAPE, storage, cut).numbers()
        assert torch.equal(ours.to(theirs.dtype), theirs[cut])


def test_awq_is_what_the_converter_reads():
    published = awq(group=64, half=False, shape=(40, 192))
    converter = AutoAWQConverter(group_size=64, zero_point=True)
    stored = {
        name.removeprefix(f"{MODULE}."): each for name, each in converter.process(dict(published.tensors)).items()
    }
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=64)
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(stored, weights_alone(weights))[
        "weight"
    ]
    assert torch.equal(torch.from_numpy(published.numbers).to(theirs.dtype), theirs)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_experts_of_gpt_oss_are_what_transformers_reads(projection):
    published = gpt_oss(projection=projection, expert=2)
    blocks, scales = (next(each for name, each in published.tensors.items() if name.endswith(end))
                      for end in ("_blocks", "_scales"))  # fmt: skip
    theirs_IO = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[2]
    if projection != "down_proj":
        theirs_IO = theirs_IO[:, projection == "up_proj" :: 2]
    assert torch.equal(torch.from_numpy(published.numbers), theirs_IO.T)


def test_blocks_of_fp8_are_what_transformers_reads():
    published = fp8_block()
    tensors = (published.tensors[f"{MODULE}.{name}"] for name in ("weight", "weight_scale_inv"))
    assert torch.equal(torch.from_numpy(published.numbers), _dequantize_fp8_weight(*tensors, [128, 128], torch.float32))
