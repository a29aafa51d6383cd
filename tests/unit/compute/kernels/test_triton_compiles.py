"""The Triton kernels compile for a Hopper GPU, on a machine that has none: ptxas comes with Triton."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction, mangle_type  # noqa: E402

from longhelix.compute.kernels import PLAIN, Weight  # noqa: E402
from longhelix.compute.kernels.experts import SWIGLU, addresses  # noqa: E402
from longhelix.compute.kernels.packed_rows import PackedRows  # noqa: E402
from longhelix.compute.kernels.triton import (  # noqa: E402
    activate_rows,
    attention,
    expert_rows,
    experts,
    merge,
    merge_states,
    multiply_packed,
    norm_rows,
    packed_products,
    partial_attention,
    rotate,
    rows,
    run_experts,
    weight_tiles,
    write,
    write_kv,
)
from longhelix.spec import FORMATS  # noqa: E402
from tiers import few  # noqa: E402

pytestmark = pytest.mark.unit

SHARED_MEMORY_BYTES = 227 * 1024
LEAST_SHARED_MEMORY_BYTES = 99 * 1024  # of GPUs since compute capability 8.0
BF16, INT8, FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
NVFP4 = torch.uint8  # what its pools hold


def compile_for(capability: int, kernel: JITFunction, arguments: dict[str, object]) -> CompiledKernel:
    """As a launch with these arguments would: ones and None become constants, and multiples of 16 are known as such."""
    options = {name: arguments.pop(name) for name in set(arguments) - set(kernel.arg_names)}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value, free = arguments[parameter.name], parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if torch.is_tensor(value) or (type(value) is int and value % 16 == 0 and not free):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def capability() -> int:
    """Of Hopper GPUs."""
    return 90


@pytest.fixture
def compiled(capability, monkeypatch, tmp_path) -> list[CompiledKernel]:
    """What the launches of a test compile to; nothing is launched."""
    kernels: list[CompiledKernel] = []

    class Recorder:
        def __init__(self, kernel: JITFunction) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*values: object, **named: object) -> None:
                assert all(size > 0 for size in grid)
                arguments = dict(zip(self.kernel.arg_names, values, strict=False)) | named
                kernels.append(compile_for(capability, self.kernel, arguments))

            return launch

    def record(module: ModuleType, name: str) -> None:
        kernel = getattr(module, name)
        if not isinstance(kernel, JITFunction):
            pytest.skip("TRITON_INTERPRET is set, and what is interpreted is not compiled")
        monkeypatch.setattr(module, name, Recorder(kernel))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    record(attention, "_attend")
    record(merge, "_merge_splits")
    record(merge, "_merge_states")
    record(write, "_write_kv")
    record(write, "_write_nvfp4")
    for name in ("_norm_rows", "_activate_rows", "_rotate"):
        record(rows, name)
    for name in ("_multiply", "_sum_splits"):
        record(packed_products, name)
    for name in ("_count", "_place"):
        record(expert_rows, name)
    for name in ("_norm", "_gate_up", "_down", "_sum_parts"):
        record(experts, name)
    return kernels


def scales_of(pool_dtype: torch.dtype, *size: int) -> torch.Tensor | None:
    """Scales of a pool with the sizes (P, A, D, k, C)."""
    if pool_dtype == NVFP4:
        return torch.empty(*size[:4], size[4] // 16 + 1, dtype=torch.uint8)
    return torch.empty(size[:4]) if pool_dtype.itemsize == 1 else None


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "query_heads", "kv_heads", "key_size", "value_size"),
    [
        (BF16, BF16, 64, 8, 128, 128),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # seconds each, most of them ptxas'
            for case in (
                (BF16, FLOAT8, 128, 1, 576, 512),
                (torch.float32, torch.float32, 16, 1, 576, 512),
                (BF16, BF16, 9, 3, 64, 64),
                (BF16, FLOAT8, 64, 8, 128, 128),
                (BF16, NVFP4, 64, 8, 128, 128),
                (BF16, NVFP4, 128, 1, 576, 512),
                (BF16, INT8, 16, 1, 256, 256),
                (BF16, BF16, 128, 1, 576, 512),
                (BF16, BF16, 8, 1, 512, 512),
                (BF16, FLOAT8, 64, 1, 512, 512),
                (torch.float32, FLOAT8, 16, 1, 128, 128),
                (torch.float16, torch.float16, 32, 32, 80, 80),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_window", few([False, True]))
def test_attention_compiles_for_hopper(
    has_window, dtype, pool_dtype, query_heads, kv_heads, key_size, value_size, compiled
):
    rows = attention.FEW_ROWS + 1
    size = 3, 2 if key_size == value_size else 1, 16, kv_heads
    partial_attention(
        torch.empty(rows, query_heads, key_size, dtype=dtype),
        torch.empty(*size, key_size // (2 if pool_dtype == NVFP4 else 1), dtype=pool_dtype),
        scales_of(pool_dtype, *size, key_size),
        torch.empty(9, dtype=torch.int64),
        torch.empty(1, 2, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64),
        torch.empty(rows, dtype=torch.int64),
        0.1,
        value_size,
        rows,
        attention.SPLIT_TOKENS + 1,
        torch.empty(rows, dtype=torch.int64) if has_window else None,
    )
    few_rows, many, merged = compiled
    for kernel in (few_rows, many, merged):
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
    for kernel in (few_rows, many):
        # Loads run ahead of the products, and those of half floats run on tensor cores.
        assert "cp.async" in kernel.asm["ptx"]
        assert ("mma" in kernel.asm["ptx"]) == (dtype != torch.float32)
    assert dtype == torch.float32 or "wgmma" in many.asm["ptx"]


def test_merge_and_write_compile_for_hopper(compiled):
    merge_states(torch.empty(8, 5, 16, 128, dtype=BF16), torch.empty(8, 5, 16))
    merge_states(torch.empty(3, 5, 16, 512, dtype=BF16), torch.empty(3, 5, 16))
    k_TkC, v_TkC = torch.empty(5, 10, 128, dtype=BF16).split((2, 8), dim=1)[1], torch.empty(5, 8, 128, dtype=BF16)
    slots_T = torch.empty(5, dtype=torch.int64)
    for pool_dtype in (torch.float32, BF16, torch.float16, INT8, FLOAT8):
        scales_PADk = scales_of(pool_dtype, 3, 2, 16, 8, 128)
        write_kv(k_TkC, v_TkC, torch.empty(3, 2, 16, 8, 128, dtype=pool_dtype), scales_PADk, slots_T)
    write_kv(torch.empty(5, 1, 576), None, torch.empty(3, 1, 16, 1, 576, dtype=BF16), None, slots_T)
    scales_PADkG = scales_of(NVFP4, 3, 2, 16, 8, 128)
    write_kv(k_TkC, v_TkC, torch.empty(3, 2, 16, 8, 64, dtype=NVFP4), scales_PADkG, slots_T)
    assert len(compiled) == 9


def test_rows_compile_for_hopper(compiled):
    x_TX, cos_TR = torch.empty(5, 4096, dtype=BF16), torch.empty(5, 64)
    norm_rows(x_TX, x_TX[0], 1e-5)
    activate_rows(x_TX, SWIGLU)
    rotate(x_TX, 4, 128, None, None, 0.0, cos_TR, cos_TR)
    rotate(x_TX, 4, 128, x_TX[0, :128], x_TX[0, :128], 1e-5, cos_TR, cos_TR)
    assert len(compiled) == 4


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "columns"),
    [
        (BF16, 1, 7168, 256),
        (BF16, 4096, 7168, 256),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (BF16, 512, 2880, 2880),
                (torch.float16, 64, 4096, 1792),
                (torch.float32, 64, 4096, 1792),
                (BF16, 64, 100, 50),
            )
        ),
    ],
    ids=str,
)
def test_experts_compile_for_hopper(dtype, rows, hidden, columns, compiled):
    """DeepSeek's 256 experts, of which 32 are here, and a shared one."""
    ids = (*range(32), 256)
    gate_up, down = torch.empty(2 * columns, hidden, dtype=dtype), torch.empty(hidden, columns, dtype=dtype)
    weights = ([Weight(weight, "", *weight.shape, PLAIN)] * len(ids) for weight in (gate_up, down))
    x_TH, counts = torch.empty(rows, hidden, dtype=dtype), torch.empty(len(ids), dtype=torch.int64)
    taken = torch.empty(rows, 9), torch.empty(rows, 9, dtype=torch.int64)
    run_experts(
        x_TH,
        *addresses(ids, *weights, 257),
        [columns] * len(ids),
        *taken,
        counts,
        SWIGLU,
        x_TH[0],
        1e-6,
        torch.empty_like(x_TH),
    )
    by_name = {kernel.metadata.name: kernel for kernel in compiled}
    assert list(by_name) == ["_count", "_place", "_norm", "_gate_up", "_down", "_sum_parts"]
    assert all(kernel.metadata.shared <= SHARED_MEMORY_BYTES for kernel in compiled)
    if dtype == torch.float32 or hidden % 8:
        return
    for name, factors in (("_gate_up", 3), ("_down", 2)):
        # Rows and weights alike are loaded ahead of the products, 16 bytes at a time.
        text = by_name[name].asm["ttgir"]
        assert len(re.findall(r"local_alloc : \(\) -> !ttg.memdesc<[2-9]x", text)) == factors
        assert set(re.findall(r"cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], (\w+)", by_name[name].asm["ptx"])) == {
            "0x10"
        }
        assert ("wgmma" if rows > 500 else "mma.sync") in by_name[name].asm["ptx"]


# Format, dtype of rows, and how many rows there are.
PACKED = [
    ("nvfp4", BF16, 1),
    ("any_k", BF16, 512),
    ("fp8-block", BF16, 512),
    ("int4-g32-zero", BF16, 1),
    ("int4-g128", BF16, 64),
    ("mxfp4", BF16, 512),
    ("mxfp8", torch.float16, 1),
    ("int8-channel", BF16, 512),
    ("fp8-channel", torch.float16, 64),
    ("int4-g64-float16-zero", torch.float16, 512),
    ("nvfp4", torch.float32, 1),
    ("int4-g128", torch.float32, 1),
    ("q8_0", BF16, 64),
    ("q5_1", torch.float16, 1),
    ("q4_k", BF16, 1),
    ("q4_k", torch.float32, 1),
    ("q6_k", BF16, 1),
    ("iq4_nl", BF16, 512),
    ("iq4_xs", BF16, 1),
]


@pytest.mark.parametrize(("name", "dtype", "rows"), few(PACKED, 2), ids=str)
def test_products_with_packed_weights_compile_for_hopper(name, dtype, rows, compiled):
    weight = PackedRows.empty(name, 4096, 7168, 0, torch.device("cpu"))
    multiply_packed(torch.empty(rows, 7168, dtype=dtype), weight, dtype, torch.empty(4096, dtype=dtype))
    by_name = {kernel.metadata.name: kernel for kernel in compiled}
    product = by_name["_multiply"]
    assert product.metadata.shared <= SHARED_MEMORY_BYTES
    assert "ftz" not in product.asm["ptx"]  # numbers are subnormal on their way
    if dtype != torch.float32:
        _assert_loads_ahead(product, 1, name)
        assert ("wgmma" if rows > 16 else "mma.sync") in product.asm["ptx"]


def test_packed_weights_that_begin_anywhere_compile_for_hopper(compiled):
    for name, lead in (("int4-g32", 3), ("nvfp4", 2), ("fp8-block", 5), ("q6_k", 201)):
        weight = PackedRows.empty(name, 33, 75, lead, torch.device("cpu"))
        multiply_packed(torch.empty(3, 75, dtype=BF16), weight, BF16)
    assert len(compiled) == 4


def run_packed_experts(name: str, dtype: torch.dtype, rows: int, rounds_inputs: bool = False) -> None:
    hidden, columns, held = 7168, 256, 4
    table = torch.zeros(held, 3, dtype=torch.int64)
    index_E, counts = torch.empty(16, dtype=torch.int32), torch.empty(held, dtype=torch.int64)
    x_TH = torch.empty(rows, hidden, dtype=dtype)
    taken = torch.empty(rows, 2), torch.empty(rows, 2, dtype=torch.int64)
    options = counts, SWIGLU, x_TH[0], 1e-6, None, name, 128, rounds_inputs
    run_experts(x_TH, index_E, table, [columns] * held, *taken, *options)


@pytest.mark.parametrize(("name", "dtype", "rows"), few(PACKED), ids=str)
def test_packed_experts_compile_for_hopper(name, dtype, rows, compiled):
    run_packed_experts(name, dtype, rows)
    by_name = {kernel.metadata.name: kernel for kernel in compiled}
    for kernel, weights in (("_gate_up", 2), ("_down", 1)):
        assert by_name[kernel].metadata.shared <= SHARED_MEMORY_BYTES
        if dtype != torch.float32:
            _assert_loads_ahead(by_name[kernel], weights, name)


ROUNDING = [("fp8-block", BF16, 512), ("fp8-channel", BF16, 1), ("fp8-block", torch.float32, 512)]


@pytest.mark.parametrize(("name", "dtype", "rows"), few(ROUNDING), ids=str)
def test_products_in_fp8_compile_for_hopper(name, dtype, rows, compiled):
    weight = PackedRows.empty(name, 4096, 7168, 0, torch.device("cpu"))
    multiply_packed(torch.empty(rows, 7168, dtype=dtype), weight, dtype, rounds_inputs=True)
    run_packed_experts(name, dtype, rows, rounds_inputs=True)
    by_name = {kernel.metadata.name: kernel for kernel in compiled}
    for kernel, weights in (("_multiply", 1), ("_gate_up", 2), ("_down", 1)):
        ptx = by_name[kernel].asm["ptx"]
        assert by_name[kernel].metadata.shared <= SHARED_MEMORY_BYTES
        # For few rows, Triton multiplies the same numbers in float16.
        assert (r"k32.f32.e4m3.e4m3" if rows > 16 else "mma.sync") in ptx
        # Gate and up round their inputs once: a warp has 32 numbers for each 16 of them in a tile.
        tile = next(tile for most_rows, tile in weight_tiles.ROUNDING_TILES.items() if rows <= most_rows)
        assert 2 * len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == tile.rows * 128 // (32 * tile.warps)
        _assert_loads_ahead(by_name[kernel], weights, name)


@pytest.mark.parametrize("capability", few([80, 89]))
def test_products_with_e4m3_compile_for_earlier_gpus(capability, compiled, monkeypatch):
    """Those before compute capability 8.9 have no e4m3."""
    monkeypatch.setattr(weight_tiles, "has_e4m3", lambda device: capability >= 89)
    for name in ("fp8-block", "fp8-channel", "mxfp8", "nvfp4"):
        for rounds_inputs in {False, capability >= 89 and name.startswith("fp8")}:
            weight = PackedRows.empty(name, 4096, 7168, 0, torch.device("cpu"))
            multiply_packed(torch.empty(64, 7168, dtype=BF16), weight, BF16, rounds_inputs=rounds_inputs)
            run_packed_experts(name, BF16, 64, rounds_inputs)
    kernels = [kernel for kernel in compiled if kernel.metadata.name in ("_multiply", "_gate_up", "_down")]
    assert len(kernels) == 3 * (4 if capability == 80 else 6)
    for kernel in kernels:
        assert kernel.metadata.shared <= LEAST_SHARED_MEMORY_BYTES
        assert capability == 89 or "e4m3" not in kernel.asm["ptx"]


def _assert_loads_ahead(kernel: CompiledKernel, weights: int, name: str) -> None:
    """Rows and codes of some weights are loaded ahead of the products, with wide loads.

    Codes of six bits have two loads, and the second is of few bytes.
    """
    has_six = FORMATS[name].bits == 6
    allocated = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<[2-9]x", kernel.asm["ttgir"])
    assert len(allocated) == 1 + weights * (2 if has_six else 1)
    widths = set(re.findall(r"cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], (\w+)", kernel.asm["ptx"]))
    assert widths <= {"0x10", "0x8", *(["0x4"] if has_six else [])}
