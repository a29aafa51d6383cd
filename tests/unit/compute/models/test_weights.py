"""Loading reads this rank's slices and nothing more."""

import pytest
import torch
from safetensors.torch import save, save_file

from longhelix.compute.kernels import PANELS, PLAIN, make_weight, native
from longhelix.compute.models import weights as weights_module
from longhelix.compute.models.parameters import check, declare
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.weights import Weights
from longhelix.errors import UserError
from longhelix.spec import MoE, RopeSpec
from longhelix.spec.layout import Layout
from longhelix.spec.weights import WeightDtype
from toy_model import toy_model

pytestmark = pytest.mark.unit
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")

CPU = torch.device("cpu")

SPEC = toy_model(
    architecture="qwen2", num_layers=2, hidden_size=20, num_query_heads=9, num_kv_heads=3, head_size=4, ffn_size=17,
    vocab_size=31, max_positions=64, rms_norm_eps=1e-6, rope=RopeSpec(), dtype="float32", qkv_bias=True,
)  # fmt: skip
# Heads of 24 rows, which do not fill panels.
WIDE = toy_model(
    architecture="qwen3_moe", num_layers=2, hidden_size=96, num_query_heads=8, num_kv_heads=4, head_size=24,
    ffn_size=64, vocab_size=75, max_positions=64, rms_norm_eps=1e-6, rope=RopeSpec(), dtype="float32",
    moe=MoE(4, 2, 64), num_dense_layers=1,
)  # fmt: skip


class CountingCheckpoint(SafetensorsCheckpoint):
    """Counts the elements that it is asked for."""

    elements_read = 0

    def read(self, name, slices):
        tensor = super().read(name, slices)
        self.elements_read += tensor.numel()
        return tensor


@pytest.fixture
def tensors(tmp_path):
    made = {}
    for parameter in declare(SPEC, Layout(), 0):
        for source in parameter.sources:
            made[source.name] = torch.randn(source.shape)
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, made


@pytest.mark.parametrize("layout", [Layout(), Layout(kvp=2, tpa=2), Layout(kvp=3, tpa=2), Layout(tpa=4)], ids=str)
def test_a_rank_reads_its_own_share(tensors, layout):
    folder, made = tensors
    total = sum(tensor.numel() for tensor in made.values())
    for rank in range(layout.world_size):
        checkpoint, told = CountingCheckpoint(folder), []
        check(SPEC, {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()}, gguf=False)
        parameters = declare(SPEC, layout, rank)
        weights = Weights(checkpoint, parameters, torch.float32, "float32", CPU, told.append)
        taken = {parameter.name: weights.take(parameter.name) for parameter in parameters}
        assert not weights.unused
        kept = sum(weight.numel() for weight in taken.values())
        assert checkpoint.elements_read == kept == sum(told) == sum(p.num_elements for p in parameters)
        assert kept == total if layout.world_size == 1 else kept < 0.8 * total
        assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in taken.values())
        for parameter in parameters:
            assert torch.equal(taken[parameter.name], of_rank(made, parameter))


def of_rank(made, parameter):
    return torch.cat(
        [
            made[source.name][tuple(slice(items.start, items.stop) for items in source.slices)]
            for source in parameter.sources
        ]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_that_was_asked_for(tensors, dtype):
    folder, made = tensors
    weights = Weights(SafetensorsCheckpoint(folder), declare(SPEC, Layout(), 0), dtype, "float32", CPU)
    taken = weights.take("embedding")
    assert taken.dtype == dtype
    assert torch.equal(taken, made["model.embed_tokens.weight"].to(dtype))


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def wide_tensors(request, tmp_path):
    """Of a model that can be packed, in a dtype. The file's tensors begin at odd bytes, as some old files' do."""
    dtype = getattr(torch, request.param)
    made = {
        source.name: (torch.randn(source.shape) / 8).to(dtype)
        for parameter in declare(WIDE, Layout(), 0)
        for source in parameter.sources
    }
    stored = save(made)
    size = int.from_bytes(stored[:8], "little")
    header = stored[8 : 8 + size].rstrip()
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + stored[8 + size :])
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, made


@needs_native
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(kvp=2, tpa=2), Layout(kvp=1, tpa=4, tpf=2, ep=2), Layout(kvp=2, tpf=1, ep=2)], ids=str
)
def test_products_are_laid_out_as_the_tensor_of_their_slices_is(wide_tensors, monkeypatch, layout, weight_dtype):
    """Read in pieces of a few rows, of tensors that end inside of panels."""
    folder, made = wide_tensors
    monkeypatch.setattr(weights_module, "_PIECE_ELEMENTS", 700)
    for rank in range(layout.world_size):
        parameters = [
            parameter
            for parameter in declare(WIDE, layout, rank)
            # Of some shares of columns no blocks can be made.
            if parameter.stored is WeightDtype.PRODUCT
            and PANELS.holds(parameter.local_shape, weight_dtype, CPU, parameter.lead(weight_dtype))
        ]
        assert {parameter.name for parameter in parameters} >= {"head", "layers.0.qkv", "layers.1.qkv"}
        told = []
        weights = Weights(SafetensorsCheckpoint(folder), parameters, torch.float32, weight_dtype, CPU, told.append)
        for parameter in parameters:
            halves = 2 if parameter.name.endswith("gate_up") else 1
            expected = make_weight(of_rank(made, parameter), weight_dtype, halves)
            loaded = weights.product(parameter.name, halves)
            assert (loaded.arrangement, loaded.outputs, loaded.depth) == (PANELS, expected.outputs, expected.depth)
            assert torch.equal(loaded.values, expected.values)
        assert not weights.unused
        assert sum(told) == sum(parameter.num_elements for parameter in parameters)
        assert max(told) <= 48 * 192  # whole heads and panels


def test_products_that_cannot_be_packed_are_tensors(tensors):
    folder, made = tensors
    weights = Weights(SafetensorsCheckpoint(folder), declare(SPEC, Layout(), 0), torch.bfloat16, "bfloat16", CPU)
    weight = weights.product("layers.0.gate_up", halves=2)
    assert weight.arrangement is PLAIN
    stacked = [made[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(weight.values, torch.cat(stacked).bfloat16())
    with pytest.raises(UserError, match="weight_dtype int8 needs the native CPU kernels and weights whose number"):
        Weights(SafetensorsCheckpoint(folder), declare(SPEC, Layout(), 0), torch.bfloat16, "int8", CPU).product(
            "layers.0.down"
        )
