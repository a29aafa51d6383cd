"""Tensors of the model that are parts of the tensors that GGUF files store."""

import gguf
import numpy as np
import pytest
import torch

from gguf_metadata import metadata_of, write_metadata
from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.models.parameters import check, declare
from longhelix.compute.models.schemes import SCHEMES, with_stored_scales
from longhelix.compute.models.weights import Weights
from longhelix.errors import UserError
from longhelix.spec.gguf_quantisation import GGUF_FORMATS
from longhelix.spec.layout import Layout
from longhelix.spec.quantisation import Storage

pytestmark = pytest.mark.unit


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def opened(tmp_path, family, tensors, **changes):
    return open_checkpoint(str(write_metadata(tmp_path / "toy.gguf", family, tensors, **changes)))


def read(checkpoint, name, *slices):
    shape = checkpoint.tensors[name].shape
    return checkpoint.read(name, slices or tuple(slice(0, size) for size in shape)).numpy()


def test_experts_are_slices_of_one_tensor(tmp_path):
    gate, both = numbers(3, 5, 8), numbers(3, 10, 8)
    tensors = {"blk.0.ffn_gate_exps.weight": gate, "blk.1.ffn_gate_up_exps.weight": both}
    checkpoint = opened(tmp_path, "qwen3_moe", tensors)
    assert len(checkpoint.tensors) == 9
    for expert in range(3):
        first, second = (f"model.layers.{layer}.mlp.experts.{expert}" for layer in (0, 1))
        np.testing.assert_array_equal(read(checkpoint, f"{first}.gate_proj.weight"), gate[expert])
        np.testing.assert_array_equal(read(checkpoint, f"{second}.gate_proj.weight"), both[expert, :5])
        part = read(checkpoint, f"{second}.up_proj.weight", slice(1, 4), slice(2, 7))
        np.testing.assert_array_equal(part, both[expert, 6:9, 2:7])


def test_rows_of_heads_come_in_the_models_order_as_bytes_as_well(tmp_path):
    heads = numbers(2, 2, 16, 256)
    weight = heads.reshape(64, 256)
    stored = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(64, 256)
    checkpoint = opened(tmp_path, "llama", {"blk.0.attn_k.weight": stored})
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(read(checkpoint, name), weight)
    blocks = checkpoint.stored[name].blocks(slice(7, 50))
    np.testing.assert_array_equal(blocks.view("<f4"), weight[7:50])


@pytest.mark.parametrize("has_both", [False, True])
def test_halves_of_the_latent_projection_become_one(tmp_path, has_both):
    """Of a file with both forms, the whole projection is read."""
    keys, values = numbers(8, 24, 48), numbers(8, 32, 48) + 1
    whole = np.concatenate([keys, values], axis=1).reshape(8 * 56, 48)
    tensors = {"blk.0.attn_k_b.weight": np.ascontiguousarray(keys.swapaxes(1, 2)), "blk.0.attn_v_b.weight": values}
    tensors |= {"blk.0.attn_kv_b.weight": whole + 1} if has_both else {}
    checkpoint = opened(tmp_path, "deepseek_v3", tensors)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert checkpoint.tensors[name].shape == whole.shape
    np.testing.assert_array_equal(read(checkpoint, name), whole + has_both)
    part = read(checkpoint, name, slice(30, 200), slice(3, 40))  # no whole heads
    np.testing.assert_array_equal(part, (whole + has_both)[30:200, 3:40])


def test_halves_of_different_types_lose_no_digits(tmp_path):
    keys, values = numbers(8, 48, 24).astype(np.float16), numbers(8, 32, 48)
    checkpoint = opened(tmp_path, "deepseek_v3", {"blk.0.attn_k_b.weight": keys, "blk.0.attn_v_b.weight": values})
    found = read(checkpoint, "model.layers.0.self_attn.kv_b_proj.weight").reshape(8, 56, 48)
    np.testing.assert_array_equal(found[:, :24], keys.swapaxes(1, 2).astype(np.float32))
    np.testing.assert_array_equal(found[:, 24:], values)


def test_a_gate_of_shared_experts_is_one_row(tmp_path):
    gate = numbers(256)
    checkpoint = opened(tmp_path, "qwen2_moe", {"blk.0.ffn_gate_inp_shexp.weight": gate})
    found = read(checkpoint, "model.layers.0.mlp.shared_expert_gate.weight", slice(0, 1), slice(10, 200))
    np.testing.assert_array_equal(found, gate[None, 10:200])


@pytest.mark.parametrize(
    ("family", "tensors", "words"),
    [
        ("qwen3_moe", {"blk.0.ffn_gate_exps.weight": (5, 8)}, "not that of the experts of a layer"),
        ("qwen3_moe", {"blk.0.ffn_gate_up_exps.weight": (2, 5, 8)}, "not that of the experts of a layer"),
        ("deepseek_v3", {"blk.0.attn_k_b.weight": (8, 48, 24)}, "not the two parts of one projection"),
        (
            "deepseek_v3",
            {"blk.0.attn_k_b.weight": (8, 24, 48), "blk.0.attn_v_b.weight": (8, 32, 48)},
            "not the two parts of one projection",
        ),
        ("qwen3", {"blk.0.ffn_gate.3.weight": (5, 8)}, "which a qwen3 model does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, family, tensors, words):
    with pytest.raises(UserError, match=words) as caught:
        opened(tmp_path, family, {name: numbers(*shape) for name, shape in tensors.items()})
    assert next(iter(tensors)) in str(caught.value)


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(tmp_path):
    tensors = {f"blk.4.nextn.{name}.weight": numbers(8) for name in ("eh_proj", "enorm", "shared_head_norm")}
    tensors |= {"blk.4.ffn_gate_exps.weight": numbers(2, 5, 8), "output.weight": numbers(8)}
    changes = {"block_count": 5, "nextn_predict_layers": 1}
    checkpoint = opened(tmp_path, "deepseek_v3", tensors, **changes)
    spec = checkpoint.spec()
    assert spec.num_layers == 4
    needed = {source.name: (source.shape, "float32") for each in declare(spec, Layout(), 0) for source in each.sources}
    predicting = {name: info for name, info in checkpoint.tensors.items() if name.startswith("model.layers.4.")}
    assert len(predicting) == 5
    with pytest.warns(
        UserWarning, match="5 tensors of the checkpoint, such as 'model.layers.4.eh_proj.weight', are not"
    ):
        check(spec, needed | {name: (info.shape, info.dtype) for name, info in predicting.items()}, gguf=True)


def test_weights_of_every_rank_have_the_numbers_of_the_file(tmp_path):
    """Whatever the dtype of activations: float16, and float16 beside blocks, float32 and bfloat16."""
    path = tmp_path / "toy.gguf"
    write_layers(path)
    checkpoint = open_checkpoint(str(path))
    spec = checkpoint.spec()
    kept = {"qkv": "float32", "output": "float16", "gate_up": "float32", "down": "float32", "embedding": "float16"}
    for layout in (Layout(), Layout(kvp=2), Layout(kvp=2, tpa=2)):
        for rank in range(layout.world_size):
            parameters = {each.name: each for each in declare(spec, layout, rank)}
            assert "head" not in parameters  # it is the embedding
            for dtype in ("bfloat16", "float16", "float32"):
                of_dtype = getattr(torch, dtype)
                weights = Weights(checkpoint, tuple(parameters.values()), of_dtype, dtype, torch.device("cpu"))
                for name, format in kept.items():
                    name = name if name == "embedding" else f"layers.0.{name}"
                    weight = weights.product(name)
                    assert weight.dtype == format
                    wanted_OI = torch.cat([read_part(checkpoint, source) for source in parameters[name].sources])
                    rows_O = torch.arange(weight.outputs)
                    assert torch.equal(weight.rows(rows_O).double(), wanted_OI.double())
                    assert weight.values.nbytes >= parameters[name].stored_bytes(dtype, dtype)


def read_part(checkpoint, source):
    """The numbers of a source that a rank keeps, as the gguf package decodes them."""
    rows, inputs = source.slices
    stored = checkpoint.stored[source.name]
    whole_OI = torch.tensor(gguf.quants.dequantize(stored.data, stored.kind))
    return whole_OI[rows.start : rows.stop, inputs.start : inputs.stop]


def write_layers(path):
    """A qwen2 model of one layer with weights of different types, such as F16 beside Q8_0."""
    F16, F32, BF16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F16", "F32", "BF16", "Q8_0"))
    tensors = {
        "token_embd": (F16, 1000, 256),
        "blk.0.attn_q": (F16, 256, 256),
        "blk.0.attn_k": (Q8_0, 64, 256),
        "blk.0.attn_v": (BF16, 64, 256),
        "blk.0.attn_output": (F16, 256, 256),
        "blk.0.ffn_gate": (F16, 512, 256),
        "blk.0.ffn_up": (F32, 512, 256),
        "blk.0.ffn_down": (F32, 256, 512),
    }
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in metadata_of("qwen2", block_count=1).items():
        add = {int: writer.add_uint32, float: writer.add_float32}
        if type(value) in add:
            add[type(value)](key, value)
    for name, (kind, *shape) in tensors.items():
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers(*shape), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_half_precision_stays_what_it_is(tmp_path):
    checkpoint = opened(tmp_path, "qwen3", {"output_norm.weight": numbers(8).astype(np.float16)})
    assert checkpoint.tensors["model.norm.weight"].dtype == "float16"
    assert checkpoint.read("model.norm.weight", (slice(2, 5),)).dtype == torch.float16


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_a_packed_weight_of_a_wrong_shape_is_one_sentence(tmp_path, kind):
    storage = Storage("gguf", GGUF_FORMATS[kind])
    tensors = {"model.layers.0.mlp.up_proj.weight": TensorInfo("", (64, 96), kind)}
    assert with_stored_scales(storage, tensors, "model.layers.0.mlp.up_proj", (64, 128)) == storage
    form = SCHEMES["gguf"].tensors("up_proj", (64, 128), storage)["up_proj.weight"]
    assert form.allows((64, 128), kind)
    assert not form.allows((64, 96), kind)
    assert not form.allows((64, 128), "Q5_K")
