"""Number formats, and what a layer caches: the bytes that everyone counts with are those of the engine's tensors."""

import pytest
import torch

from longhelix.compute.kernels import TILES, KVFormat, make_weight, native
from longhelix.compute.runner.pool_size import kv_bytes_per_token
from longhelix.errors import UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import memory
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import DTYPES, FORMATS, KV_DTYPES, WEIGHT_DTYPES, CacheEntry, number_format
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from toy_model import attention_of

pytestmark = pytest.mark.unit

META = torch.device("meta")
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
ENTRIES = [CacheEntry("kv", 128, 128), CacheEntry("latent", 576, 512, shared_values=True)]


def test_the_engines_choices_are_formats_that_no_checkpoint_packs():
    assert " ".join(DTYPES) == "float32 bfloat16 float16"
    assert " ".join(WEIGHT_DTYPES) == "float32 bfloat16 float16 int8 int4 fp8-block int4-g128 nvfp4"
    assert " ".join(KV_DTYPES) == "float32 bfloat16 float16 fp8 int8 int4 nvfp4"
    packed = {name for name, format in FORMATS.items() if format.codes is not None}
    assert {*WEIGHT_DTYPES, *KV_DTYPES, "fp4", "w8a8"} - packed == FORMATS.keys() - packed
    for name, bits in (("mxfp8", 8.25), ("fp8-block", 8.25), ("int4-g128", 4.125), ("int4-g32-zero", 4.75)):
        assert 8 * FORMATS[name].weight_bytes == bits
    for name, bits in (("fp4", 4), ("nvfp4", 4.5), ("mxfp4", 4.25)):
        assert 8 * FORMATS[name].weight_bytes == bits
        of_vectors = 2 * 8 if name == "nvfp4" else 0
        assert 8 * CacheEntry("kv", 128, 64).head_bytes(FORMATS[name], "cuda") == 192 * bits + of_vectors


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"kv-dtype 'fp6' is not known: use one of float32, .*, fp4") as refused:
        number_format("fp6", "kv-dtype")
    assert refused.value.code == "unsupported_dtype"


@needs_native
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_bytes_of_a_weight_are_those_of_its_tensor(dtype):
    weight = make_weight(torch.zeros(48, 128), dtype)
    assert weight.values.nbytes == 48 * FORMATS[dtype].weight_row_bytes(128)


@needs_native
def test_a_scale_for_each_output_is_counted_with_its_row():
    weight = make_weight(torch.zeros(48, 96), "w8a8")
    assert weight.values.nbytes == 48 * FORMATS["w8a8"].weight_row_bytes(96) == 48 * (96 + 4)
    assert FORMATS["int8"].weight_row_bytes(96) == 96 * 9 // 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bytes_of_a_cache_entry_are_those_of_its_tensors(dtype, entry, device):
    """On GPUs scales are twice as wide as in tiles."""
    sizes = 16, 2, entry.key_size, entry.value_size
    try:
        format = KVFormat.choose(dtype, *sizes, torch.device(device), entry.shared_values)
    except UserError:
        held = {
            "cuda": dtype != "int4",
            "cpu": dtype in DTYPES or (native.module and (not entry.shared_values or dtype == "nvfp4")),
        }
        assert not held[device]
        return
    layer = format.new_layer(3, META)
    assert sum(tensor.nbytes for tensor in layer.tensors) == 3 * format.block_bytes
    assert format.block_bytes == 16 * 2 * entry.head_bytes(FORMATS[dtype], device)


def test_the_scales_of_a_token():
    """A key and a value of 128 channels, and a scale of each."""
    entry = attention_of(load_model("llama-3-8b")).cache_entry
    assert [entry.head_bytes(FORMATS[name], "cpu") for name in KV_DTYPES] == [1024, 512, 512, 260, 260, 132, 146]
    assert [entry.head_bytes(FORMATS[name], "cuda") for name in ("bfloat16", "fp8", "int8", "nvfp4")] == [
        512, 264, 264, 146
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-r1"])
@pytest.mark.parametrize(("system", "device"), [("cpu", "cpu"), ("h100", "cuda")])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8", "nvfp4"])
def test_planner_and_engine_count_the_same_bytes_of_kv(model, system, device, dtype):
    spec, hardware = load_model(model), load_system(system)
    if dtype not in hardware.arithmetic.flops_per_s:
        hardware = hardware.replaced({f"flops_per_s.{dtype}": 1e12}, "a test's")
    setting = Setting(spec, hardware, Dtypes("bfloat16", dtype))
    planned = memory(setting, Layouts.of([Layout()]), 3.0, 1000.0).kv_bytes[0]
    assert planned == 3000 * kv_bytes_per_token(spec, Layout(), dtype, device, 0)
    assert setting.kv_token_bytes == kv_bytes_per_token(spec, Layout(), dtype, device, 0)


@needs_native
def test_the_faster_arrangement_is_chosen_first():
    assert KVFormat.choose("bfloat16", 16, 2, 64, 64, torch.device("cpu")).arrangement is TILES
