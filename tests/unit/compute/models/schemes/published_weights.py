"""Weights as each publisher writes them, from the public definitions of the formats, with plain arithmetic.

Nothing here uses the package's readers. What numbers are is computed one by one, in float32 at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from longhelix.spec.quantisation import Storage

MODULE = "model.layers.0.mlp.down_proj"
_SCALES = (".weight_scale_inv", ".weight_scale", ".scales", "_scales")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass
class Published:
    """A weight in a checkpoint: the tensors, and the numbers (O, I) that they stand for."""

    scheme: str
    format: str
    tensors: dict[str, torch.Tensor]
    numbers: np.ndarray
    module: str = MODULE
    optional: tuple[str, ...] = ()
    ordered: bool = False  # a tensor says the group of each input

    @property
    def storage(self) -> Storage:
        return Storage(self.scheme, self.format, self.ordered)

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape

    @property
    def scale(self) -> str:
        """The name of the tensor with scales of outputs or blocks."""
        return next(name for name in self.tensors if name.endswith(_SCALES))


def e4m3(code: int) -> float:
    """A sign, four bits of exponent with bias 7, and three bits of mantissa (OCP FP8)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -size if code & 128 else size


def words(codes: np.ndarray) -> torch.Tensor:
    """Pack codes of four bits along the last dim into 32-bit words, the first in the lowest bits."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    packed = sum(codes[:, place::8].astype(np.uint64) << np.uint64(4 * place) for place in range(8))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def pairs(codes: np.ndarray) -> torch.Tensor:
    """Pack codes of four bits along the last dim into bytes, the first in the low half."""
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return torch.from_numpy((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))


def spread(scales: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the scale of each number, from scales of blocks."""
    return scales[np.arange(shape[0])[:, None] // rows, np.arange(shape[1])[None] // columns]


def float32(values: np.ndarray) -> np.ndarray:
    """Round once: what is given is exact in float64."""
    return values.astype(np.float32)


class Writer:
    """Draws codes and scales."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def groups(self, inputs: int, size: int, ordered: bool) -> np.ndarray:
        """Return the group of each input. Ordered inputs were quantised in a random order."""
        groups = np.arange(inputs, dtype=np.int32) // size
        return self.random.permutation(groups) if ordered else groups

    def codes(self, shape: tuple[int, int], count: int = 16) -> np.ndarray:
        return self.random.integers(0, count, shape)

    def float8(self, shape: tuple[int, int]) -> tuple[torch.Tensor, np.ndarray]:
        """Return codes of e4m3 that are numbers, and the numbers."""
        codes = self.codes(shape, 256)
        codes[codes % 128 == 127] = 0
        return bytes_as(codes, torch.float8_e4m3fn), np.vectorize(e4m3)(codes)

    def scales(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, np.ndarray]:
        scales = torch.from_numpy(self.random.uniform(0.001, 3.0, shape).astype(np.float32)).to(dtype)
        return scales, scales.double().numpy()

    def exponents(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, np.ndarray]:
        codes = self.random.integers(100, 150, shape)
        return bytes_as(codes, dtype), 2.0 ** (codes - 127)


def bytes_as(codes: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(dtype)


def named(tensors: dict[str, torch.Tensor], module: str = MODULE) -> dict[str, torch.Tensor]:
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def fp8_block(
    seed: int = 0,
    scale_dtype: torch.dtype = torch.float32,
    scheme: str = "fp8_block",
    four_dims: bool = False,
    shape: tuple[int, int] = (300, 290),
) -> Published:
    writer = Writer(seed)
    codes, values = writer.float8(shape)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    bytes_ = scale_dtype in (torch.uint8, torch.float8_e8m0fnu)
    scales, numbers = writer.exponents(grid, scale_dtype) if bytes_ else writer.scales(grid, scale_dtype)
    names = {"fp8_block": "weight_scale_inv", "float_quantized_block": "weight_scale"}
    stored = scales[:, None, :, None] if four_dims else scales
    tensors = named({"weight": codes, names[scheme]: stored})
    return Published(scheme, "fp8-block", tensors, float32(values * spread(numbers, 128, 128, shape)))


def fp8(
    seed: int = 1,
    scheme: str = "fp8",
    form: str = "outputs",
    scale_dtype: torch.dtype = torch.float32,
    shape: tuple[int, int] = (21, 37),
) -> Published:
    writer = Writer(seed)
    codes, values = writer.float8(shape)
    stored_shape = {"outputs": (shape[0],), "column": (shape[0], 1), "one": (1,), "scalar": ()}[form]
    scales, numbers = writer.scales(stored_shape, scale_dtype)
    name, inputs = {"fp8": ("weight_scale", "input_scale"), "fp8_inverse": ("weight_scale_inv", "activation_scale")}[
        scheme
    ]
    tensors = named({"weight": codes, name: scales, inputs: torch.tensor(0.5)})
    expected = float32(values * numbers.reshape(-1, 1))
    return Published(scheme, "fp8-channel", tensors, expected, optional=(f"{MODULE}.{inputs}",))


def int_quantized(seed: int = 2, form: str = "column", shape: tuple[int, int] = (21, 37)) -> Published:
    writer = Writer(seed)
    values = writer.codes(shape, 255) - 127
    stored_shape = {"column": (shape[0], 1), "one": (1,)}[form]
    scales, numbers = writer.scales(stored_shape, torch.bfloat16)
    tensors = named({"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": scales})
    return Published("int_quantized", "int8-channel", tensors, float32(values * numbers.reshape(-1, 1)))


def pack_quantized(
    seed: int = 3,
    group: int = 32,
    zero_points: bool = False,
    half: bool = False,
    ordered: bool = False,
    shape: tuple[int, int] = (21, 173),
) -> Published:
    writer = Writer(seed)
    codes, groups = writer.codes(shape), -(-shape[1] // group)
    group_of = writer.groups(shape[1], group, ordered)
    scales, numbers = writer.scales((shape[0], groups), torch.float16 if half else torch.bfloat16)
    zeros = writer.codes((shape[0], groups)) if zero_points else np.full((shape[0], groups), 8)
    stored = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if zero_points:
        stored["weight_zero_point"] = words(zeros.T).T
    if ordered:
        stored["weight_g_idx"] = torch.from_numpy(group_of)
    expected = float32((codes - zeros[:, group_of]) * numbers[:, group_of])
    format = f"int4-g{group}" + ("-float16" if half else "") + ("-zero" if zero_points else "")
    optional = (f"{MODULE}.weight_shape", f"{MODULE}.weight_g_idx")
    return Published("pack_quantized", format, named(stored), expected, optional=optional, ordered=ordered)


def pack_quantized_bytes(seed: int = 4, shape: tuple[int, int] = (21, 39)) -> Published:
    writer = Writer(seed)
    values = writer.codes(shape, 256) - 128
    scales, numbers = writer.scales((shape[0], 1), torch.bfloat16)
    padded = np.pad(values + 128, ((0, 0), (0, -shape[1] % 4))).astype(np.uint8)
    stored = {"weight_packed": torch.from_numpy(padded.view(np.int32)), "weight_scale": scales}
    return Published("pack_quantized", "int8-channel", named(stored), float32(values * numbers))


def nvfp4(seed: int = 5, scheme: str = "nvfp4_pack_quantized", shape: tuple[int, int] = (21, 74)) -> Published:
    writer = Writer(seed)
    codes = writer.codes(shape)
    blocks = (shape[0], -(-shape[1] // 16))
    scales = writer.codes(blocks, 127)
    scales[0, 0] = 0  # as for a block that is small beside its tensor
    whole = np.float32(writer.random.uniform(100, 3000))
    if scheme == "modelopt_nvfp4":
        whole = 1 / whole
        names, factor = ("weight", "weight_scale_2"), whole
        stored = torch.tensor(whole)
    else:
        names, factor = ("weight_packed", "weight_global_scale"), np.float32(1) / whole
        stored = torch.tensor([whole])
    tensors = named({names[0]: pairs(codes), "weight_scale": bytes_as(scales, torch.float8_e4m3fn), names[1]: stored})
    rounded = np.vectorize(e4m3)(scales).astype(np.float32) * factor
    return Published(scheme, "nvfp4", tensors, np.float32(np.array(E2M1)[codes]) * spread(rounded, 1, 16, shape))


def mxfp4(seed: int = 6, shape: tuple[int, int] = (21, 106), dtype: torch.dtype = torch.uint8) -> Published:
    writer = Writer(seed)
    codes = writer.codes(shape)
    scales, numbers = writer.exponents((shape[0], -(-shape[1] // 32)), dtype)
    tensors = named({"weight_packed": pairs(codes), "weight_scale": scales})
    expected = float32(np.array(E2M1)[codes] * spread(numbers, 1, 32, shape))
    return Published("mxfp4_pack_quantized", "mxfp4", tensors, expected)


def mxfp8(seed: int = 7, shape: tuple[int, int] = (21, 107)) -> Published:
    writer = Writer(seed)
    codes, values = writer.float8(shape)
    scales, numbers = writer.exponents((shape[0], -(-shape[1] // 32)))
    tensors = named({"weight": codes, "weight_scale": scales})
    return Published("mxfp8_quantized", "mxfp8", tensors, float32(values * spread(numbers, 1, 32, shape)))


def gpt_oss(
    seed: int = 8, projection: str = "up_proj", shape: tuple[int, int] = (13, 96), expert: int = 2
) -> Published:
    """Three experts. Rows of gate and up projections take turns in one tensor."""
    writer = Writer(seed)
    fused = projection != "down_proj"
    rows = shape[0] * (2 if fused else 1)
    codes = np.stack([writer.codes((rows, shape[1])) for _ in range(3)])
    scales, numbers = writer.exponents((3, rows, shape[1] // 32))
    blocks = np.stack([pairs(each).numpy() for each in codes]).reshape(3, rows, -1, 16)
    experts = MODULE.rpartition(".")[0] + ".experts"
    name = f"{experts}.{'gate_up_proj' if fused else projection}"
    tensors = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": scales}
    chosen = slice({"gate_proj": 0, "up_proj": 1}.get(projection, 0), None, 2 if fused else 1)
    values = np.array(E2M1)[codes[expert, chosen]] * spread(numbers[expert, chosen], 1, 32, shape)
    return Published("gpt_oss", "mxfp4", tensors, float32(values), module=f"{experts}.{expert}.{projection}")


def awq(
    seed: int = 9, group: int = 64, zero_points: bool = True, half: bool = True, shape: tuple[int, int] = (40, 150)
) -> Published:
    """AutoAWQ packs the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits."""
    writer = Writer(seed)
    codes, groups = writer.codes(shape), -(-shape[1] // group)
    scales, numbers = writer.scales((groups, shape[0]), torch.float16 if half else torch.bfloat16)
    zeros = writer.codes((groups, shape[0])) if zero_points else np.full((groups, shape[0]), 8)
    order = (np.arange(0, shape[0], 8)[:, None] + np.array([0, 2, 4, 6, 1, 3, 5, 7])).flatten()
    stored = {"qweight": words(codes.T[:, order]), "scales": scales}
    if zero_points:
        stored["qzeros"] = words(zeros[:, order])
    expected = float32((codes - spread(zeros.T, 1, group, shape)) * spread(numbers.T, 1, group, shape))
    format = f"int4-g{group}" + ("-float16" if half else "") + ("-zero" if zero_points else "")
    return Published("awq", format, named(stored), expected)


def gptq(
    seed: int = 10,
    group: int = 32,
    scheme: str = "gptq",
    zero_points: bool = False,
    half: bool = True,
    ordered: bool = False,
    shape: tuple[int, int] = (24, 88),
) -> Published:
    """AutoGPTQ stores zero points minus one, modulo 16. GPTQModel's second version stores them as they are."""
    writer = Writer(seed)
    codes, groups = writer.codes(shape), -(-shape[1] // group)
    scales, numbers = writer.scales((groups, shape[0]), torch.float16 if half else torch.bfloat16)
    zeros = writer.codes((groups, shape[0])) if zero_points else np.full((groups, shape[0]), 8)
    group_of = writer.groups(shape[1], group, ordered)
    stored = {
        "qweight": words(codes).T,
        "qzeros": words((zeros - 1) % 16 if scheme == "gptq" else zeros),
        "scales": scales,
        "g_idx": torch.from_numpy(group_of),
    }
    expected = float32((codes - zeros.T[:, group_of]) * numbers.T[:, group_of])
    format = f"int4-g{group}" + ("-float16" if half else "") + ("-zero" if zero_points else "")
    return Published(scheme, format, named(stored), expected, optional=(f"{MODULE}.g_idx",), ordered=ordered)


PUBLISHED: dict[str, Callable[[], Published]] = {
    "fp8 blocks": fp8_block,
    "fp8 blocks, bfloat16 scales": lambda: fp8_block(scale_dtype=torch.bfloat16),
    "fp8 blocks, exponents": lambda: fp8_block(scale_dtype=torch.float8_e8m0fnu),
    "fp8 blocks, exponents in bytes": lambda: fp8_block(scale_dtype=torch.uint8),
    "fp8 blocks of compressed-tensors": lambda: fp8_block(scheme="float_quantized_block", scale_dtype=torch.bfloat16),
    "fp8 blocks of modelopt": lambda: fp8_block(scheme="float_quantized_block", four_dims=True),
    "fp8 of outputs": lambda: fp8(form="column", scale_dtype=torch.bfloat16),
    "fp8 of outputs, modelopt": fp8,
    "fp8 of tensors": lambda: fp8(form="one"),
    "fp8 of tensors, scalar": lambda: fp8(form="scalar"),
    "fp8 of tensors, transformers": lambda: fp8(scheme="fp8_inverse", form="scalar", scale_dtype=torch.bfloat16),
    "int8 of outputs": int_quantized,
    "int8 of tensors": lambda: int_quantized(form="one"),
    "int8 in words": pack_quantized_bytes,
    "int4": pack_quantized,
    "int4, zero points": lambda: pack_quantized(group=64, zero_points=True),
    "int4, float16": lambda: pack_quantized(group=128, zero_points=True, half=True),
    "int4, ordered": lambda: pack_quantized(group=64, zero_points=True, ordered=True),
    "nvfp4": nvfp4,
    "nvfp4 of modelopt": lambda: nvfp4(scheme="modelopt_nvfp4"),
    "mxfp4": mxfp4,
    "mxfp4, exponents": lambda: mxfp4(dtype=torch.float8_e8m0fnu),
    "mxfp8": mxfp8,
    "gpt-oss gate": lambda: gpt_oss(projection="gate_proj"),
    "gpt-oss up": gpt_oss,
    "gpt-oss down": lambda: gpt_oss(projection="down_proj"),
    "awq": awq,
    "awq without zero points": lambda: awq(group=128, zero_points=False, half=False),
    "gptq": gptq,
    "gptq, zero points": lambda: gptq(zero_points=True, group=64),
    "gptq, version 2": lambda: gptq(scheme="gptq_v2", half=False),
    "gptq, ordered": lambda: gptq(ordered=True, shape=(24, 200)),
    "gptq, ordered, zero points": lambda: gptq(zero_points=True, group=128, ordered=True, shape=(24, 300)),
    "gptq, version 2, zero points": lambda: gptq(scheme="gptq_v2", zero_points=True),
}
