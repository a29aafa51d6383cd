"""Tiny quantised checkpoints in the forms in which they are published, written from the formats' public definitions.

The oracle is transformers with the dequantised weights.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from longhelix.compute.models.parameters import declare
from longhelix.spec.hf_config import read_hf_config
from longhelix.spec.layout import Layout
from oracle import NEW_TOKENS, PROMPT_LENGTHS, VOCAB, Oracle, greedy, make_oracle


@dataclass(frozen=True)
class Form:
    """A published form: its settings in config.json, and a writer of a module's weight.

    The writer returns the tensors of the module by suffix, and the numbers (float32) that they stand for.
    """

    settings: dict
    write: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
    plain: tuple[str, ...] = ()  # parts of names of modules that stay as they are
    head: bool = False  # whether the head is quantised as well


def _fp8_block(weight_OI):
    """As DeepSeek-V3 and R1: a float32 scale for each 128 x 128 weights."""
    rows, columns = weight_OI.shape
    padded = pad(weight_OI, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # rows of blocks, 128, columns of blocks, 128
    scales = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (stored.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)[:rows, :columns]
    codes = stored.flatten(0, 1).flatten(1)[:rows, :columns]
    return {".weight": codes.contiguous(), ".weight_scale_inv": scales}, numbers


def _grouped(weight_OI, size):
    """Numbers by group of inputs, (O, G, size). The last group is filled with zeros."""
    return pad(weight_OI, (0, -weight_OI.shape[1] % size)).unflatten(1, (-1, size))


def _fp8_channel(weight_OI):
    """compressed-tensors' FP8: a scale for each output, in bfloat16."""
    scales = (weight_OI.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight_OI / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def _int8_channel(weight_OI):
    """compressed-tensors' W8A16: a scale for each output."""
    scales = weight_OI.abs().amax(1, keepdim=True) / 127
    codes = (weight_OI / scales).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def _int4(weight_OI, size, zero_points):
    """Codes from 0 to 15, scales and zero points of groups, (O, G), and numbers."""
    groups = _grouped(weight_OI, size)
    if zero_points:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (most - least) / 15
        zeros = (-least / scales).round()
    else:
        scales = groups.abs().amax(-1) / 7
        zeros = torch.full_like(scales, 8)
    return groups, scales, zeros


def _int4_numbers(weight_OI, groups, scales, zeros):
    codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    numbers = (codes - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)
    columns = weight_OI.shape[1]
    return codes.flatten(1)[:, :columns].numpy().astype(int), numbers.flatten(1)[:, :columns]


def _words(codes):
    """Eight codes of a row in 32 bits, the first in the lowest."""
    rows, columns = codes.shape
    filled = np.zeros((rows, -(-columns // 8) * 8), dtype=np.uint32)
    filled[:, :columns] = codes
    shifts = np.arange(8, dtype=np.uint32) * 4
    return torch.from_numpy((filled.reshape(rows, -1, 8) << shifts).sum(-1, dtype=np.uint32).view(np.int32))


def _pack_quantized(weight_OI, size, zero_points):
    groups, scales, zeros = _int4(weight_OI, size, zero_points)
    scales = scales.bfloat16()
    codes, numbers = _int4_numbers(weight_OI, groups, scales, zeros)
    tensors = {".weight_packed": _words(codes), ".weight_scale": scales, ".weight_shape": torch.tensor(weight_OI.shape)}
    if zero_points:
        tensors[".weight_zero_point"] = _words(zeros.numpy().astype(int).T).T.contiguous()
    return tensors, numbers


def _awq(weight_OI):
    groups, scales, zeros = _int4(weight_OI, 32, zero_points=True)
    scales = scales.half()
    codes, numbers = _int4_numbers(weight_OI, groups, scales, zeros)
    outputs = len(weight_OI)
    order = (np.arange(0, outputs, 8)[:, None] + np.array([0, 2, 4, 6, 1, 3, 5, 7])).flatten()
    zero_points = _words(zeros.numpy().astype(int).T[:, order])
    return {".qweight": _words(codes.T[:, order]), ".qzeros": zero_points, ".scales": scales.T.contiguous()}, numbers


def _gptq(weight_OI, ordered=False):
    """With act-order, inputs are quantised in an order of their own, and stored as they are."""
    columns = weight_OI.shape[1]
    # The same for all weights with the same inputs, as calibration sorts them.
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if ordered else torch.arange(columns)
    )
    groups, scales, zeros = _int4(weight_OI[:, order], 32, zero_points=False)
    scales = scales.half()
    codes, numbers = _int4_numbers(weight_OI, groups, scales, zeros)
    places = order.argsort()
    codes, numbers = codes[:, places], numbers[:, places]
    return {
        ".qweight": _words(codes).T.contiguous(),
        ".qzeros": _words((zeros.numpy().astype(int).T - 1) % 16),
        ".scales": scales.T.contiguous(),
        ".g_idx": places.int() // 32,
    }, numbers


_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def _e2m1(quotients):
    """Codes and numbers: the nearest of the sixteen."""
    codes = (quotients.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    return codes + 8 * (quotients < 0), _E2M1[codes] * quotients.sign()


def _pairs(codes):
    """Two codes of a row in a byte, the first in the low half."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _nvfp4(weight_OI, divides):
    columns, blocks = weight_OI.shape[1], _grouped(weight_OI, 16)
    whole = 448 * 6 / weight_OI.abs().amax()
    scales = (blocks.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    steps = (scales.float() / whole).unsqueeze(-1)
    codes, values = _e2m1(blocks / steps)
    stored = _pairs(codes.flatten(1)[:, :columns])
    numbers = (values * steps).flatten(1)[:, :columns]
    if divides:
        return {".weight_packed": stored, ".weight_scale": scales, ".weight_global_scale": whole.view(1)}, numbers
    return {".weight": stored, ".weight_scale": scales, ".weight_scale_2": 1 / whole}, numbers


def _exponents(blocks, largest):
    """Powers of two that bring the largest number of a block to the exponent of `largest`."""
    return torch.frexp(blocks.abs().amax(-1)).exponent - math.frexp(largest)[1]


def _mxfp4(weight_OI):
    columns, blocks = weight_OI.shape[1], _grouped(weight_OI, 32)
    exponents = _exponents(blocks, 6.0)
    steps = torch.exp2(exponents).unsqueeze(-1)
    codes, values = _e2m1(blocks / steps)
    scales = (exponents + 127).to(torch.uint8)
    numbers = (values * steps).flatten(1)[:, :columns]
    return {".weight_packed": _pairs(codes.flatten(1)[:, :columns]), ".weight_scale": scales}, numbers


def _mxfp8(weight_OI):
    columns, blocks = weight_OI.shape[1], _grouped(weight_OI, 32)
    exponents = _exponents(blocks, 448.0)
    steps = torch.exp2(exponents).unsqueeze(-1)
    codes = (blocks / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
    numbers = (codes.float() * steps).flatten(1)[:, :columns]
    scales = (exponents + 127).to(torch.uint8)
    return {".weight": codes.flatten(1)[:, :columns].contiguous(), ".weight_scale": scales}, numbers


def _compressed(format, ignore=(), **weights):
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    ignored = ["lm_head", "re:.*mlp.gate$", *ignore]
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
# Kimi K2.5 packs routed experts alone.
_KIMI = ("self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# With a packed head.
HEAD = Form(
    {**_compressed("float-quantized", type="float", num_bits=8, strategy="channel"), "ignore": []},
    _fp8_channel,
    head=True,
)
FORMS = {
    "fp8-block": Form(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8_block,
    ),
    "fp8-channel": Form(_compressed("float-quantized", type="float", num_bits=8, strategy="channel"), _fp8_channel),
    "int8": Form(_compressed("int-quantized", type="int", num_bits=8, strategy="channel"), _int8_channel),
    "kimi-int4": Form(
        _compressed(
            "pack-quantized",
            ("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
            group_size=32,
            **_INT4,
        ),
        partial(_pack_quantized, size=32, zero_points=False),
        _KIMI,
    ),
    "int4-zero": Form(
        _compressed("pack-quantized", group_size=64, symmetric=False, **_INT4),
        partial(_pack_quantized, size=64, zero_points=True),
    ),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": Form({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, _gptq),
    "gptq-ordered": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        partial(_gptq, ordered=True),
    ),
    "nvfp4": Form(
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        partial(_nvfp4, divides=True),
    ),
    "nvfp4-modelopt": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        partial(_nvfp4, divides=False),
    ),
    "mxfp4": Form(
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32), _mxfp4
    ),
    "mxfp8": Form(_compressed("mxfp8-quantized", type="float", num_bits=8, strategy="group", group_size=32), _mxfp8),
}


def save_packed(config, form, folder, seed=0):
    """Save a random model in a form, in `packed`, and with the same numbers in `plain`."""
    plain, packed = Path(folder) / "plain", Path(folder) / "packed"
    make_oracle(config, plain, seed, prompt_lengths=(1,), new_tokens=1)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if _is_packed(name, tensor, form):
            parts, numbers = form.write(tensor)
            stored |= _named(parts, name)
            tensors[name] = numbers.contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    _save(stored, json.loads((plain / "config.json").read_text()), form, packed)


def save_large(config, form, folder):
    """Save random weights in a form. It is fast, because weights of one shape are the same."""
    shapes = {
        source.name: source.shape
        for parameter in declare(read_hf_config(config.to_dict()), Layout(), 0)
        for source in parameter.sources
    }
    weights = {shape: 0.1 * torch.randn(shape) for shape in dict.fromkeys(shapes.values())}
    written = cache(lambda shape: form.write(weights[shape])[0])
    stored = {}
    for name, shape in shapes.items():
        packs = _is_packed(name, weights[shape], form)
        stored |= _named(written(shape), name) if packs else {name: weights[shape]}
    _save({name: part.clone() for name, part in stored.items()}, config.to_dict(), form, Path(folder))


def make_packed_oracle(config, form, folder, prompt_lengths=PROMPT_LENGTHS, new_tokens=NEW_TOKENS, seed=0):
    """Save a random model in a form, and return transformers' answers with the same numbers."""
    folder = Path(folder)
    save_packed(config, form, folder, seed)
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, **forms).eval()
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in prompt_lengths]
    tokens, logits = zip(*(greedy(model, prompt, new_tokens) for prompt in prompts), strict=True)
    return Oracle(folder / "packed", prompts, list(tokens), list(logits))


def _named(parts, name):
    """Return the parts of a weight by their names in the checkpoint."""
    return {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}


def _save(tensors, settings, form, folder):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantised = {"quantization_config": form.settings} if form.settings else {}
    (folder / "config.json").write_text(json.dumps(settings | quantised))


def _is_packed(name, tensor, form):
    """Whether it is the weight of a linear module, and no router."""
    if name == "lm_head.weight":
        return form.head
    linear = name.startswith("model.layers.") and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    return linear and tensor.dim() == 2 and not any(part in name for part in form.plain)
