"""Loading reads this rank's slices and nothing more."""

import pytest
import torch
from safetensors.torch import save_file

from longhelix.layout import Layout
from longhelix.models.parameters import check, declare
from longhelix.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.models.weights import load
from longhelix.spec import ModelSpec, RopeSpec

pytestmark = pytest.mark.unit

SPEC = ModelSpec(
    architecture="qwen2", num_layers=2, hidden_size=20, num_query_heads=9, num_kv_heads=3, head_size=4, ffn_size=17,
    vocab_size=31, max_positions=64, rms_norm_eps=1e-6, rope=RopeSpec(), dtype="float32", qkv_bias=True,
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
        check(SPEC, {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()}, quantised=False)
        parameters = declare(SPEC, layout, rank)
        weights = load(checkpoint, parameters, torch.float32, torch.device("cpu"), told.append)
        kept = sum(weight.numel() for weight in weights.values())
        assert checkpoint.elements_read == kept == sum(told) == sum(p.num_elements for p in parameters)
        assert kept == total if layout.world_size == 1 else kept < 0.8 * total
        assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights.values())
        for parameter in parameters:
            expected = [
                made[source.name][tuple(slice(items.start, items.stop) for items in source.slices)]
                for source in parameter.sources
            ]
            assert torch.equal(weights[parameter.name], torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_that_was_asked_for(tensors, dtype):
    folder, made = tensors
    weights = load(
        SafetensorsCheckpoint(folder), declare(SPEC, Layout(), 0), dtype, torch.device("cpu"), lambda elements: None
    )
    assert all(weight.dtype == dtype for weight in weights.values())
    assert torch.equal(weights["embedding"], made["model.embed_tokens.weight"].to(dtype))
