import functools
import json
import struct
import subprocess
import sys
from array import array
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from anything import VALUES
from builtin import builtin_config
from longhelix.compute.models import safetensors_checkpoint
from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.gguf_file import GgufFile
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 6}
TENSORS = {
    "embed": torch.randn(8, 6),
    "q_proj": torch.randn(8, 6).to(torch.bfloat16),
    "norm": torch.randn(6).to(torch.float16),
    "ids": torch.arange(5),
}
SHARDS = {"embed": "a.safetensors", "q_proj": "b.safetensors", "norm": "b.safetensors", "ids": "a.safetensors"}


def whole(shape):
    return tuple(slice(0, size) for size in shape)


def bytes_of(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def write_single(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for shard in set(SHARDS.values()):
        save_file({name: TENSORS[name] for name in TENSORS if SHARDS[name] == shard}, folder / shard)
    write_index(folder, SHARDS)
    return folder


def write_index(folder: Path, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_refused(model: Path | str, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_checkpoint(str(model))
    assert caught.value.code == "invalid_checkpoint"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_safetensors_slices(write, tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path)))
    assert checkpoint.path == tmp_path
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}
    assert checkpoint.tensors == {
        "embed": TensorInfo("embed", (8, 6), "float32"),
        "q_proj": TensorInfo("q_proj", (8, 6), "bfloat16"),
        "norm": TensorInfo("norm", (6,), "float16"),
        "ids": TensorInfo("ids", (5,), "int64"),
    }
    for name, tensor in TENSORS.items():
        for rows in (slice(0, len(tensor)), slice(1, 4), slice(2, 2)):
            slices = (rows, *whole(tensor.shape[1:]))
            torch.testing.assert_close(checkpoint.read(name, slices), tensor[slices], rtol=0, atol=0)
    for name in ("embed", "q_proj"):
        slices = (slice(2, 7), slice(1, 5))
        torch.testing.assert_close(checkpoint.read(name, slices), TENSORS[name][slices], rtol=0, atol=0)


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "int8", "int32", "int64")


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=3), data=st.data())
def test_slices_of_all_dtypes_and_dims(tmp_path_factory, dtype, shape, data):
    folder = tmp_path_factory.mktemp("model")
    content = data.draw(st.binary(min_size=8 * prod(shape), max_size=8 * prod(shape)))
    numbers = torch.frombuffer(bytearray(content or b"x"), dtype=torch.uint8)[: len(content)]
    tensor = numbers.view(getattr(torch, dtype))[: prod(shape)].view(shape)
    (folder / "config.json").write_text("{}")
    save_file({"other": torch.ones(3, dtype=torch.uint8), "tensor": tensor}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors["tensor"] == TensorInfo("tensor", tuple(shape), dtype)
    starts = [data.draw(st.integers(0, size)) for size in shape]
    slices = tuple(slice(start, data.draw(st.integers(start, size))) for start, size in zip(starts, shape, strict=True))
    read = checkpoint.read("tensor", slices)
    assert read.dtype == tensor.dtype
    assert torch.equal(bytes_of(read), bytes_of(tensor[slices]))


@given(
    dtype=st.sampled_from(["F32", "F8_E4M3", "F8_E8M0", "F4", "U8", "I32", "BOOL", "X", ""]) | VALUES,
    shape=st.lists(st.integers(-1, 9), max_size=3) | VALUES,
    offsets=st.tuples(st.integers(-1, 80), st.integers(-1, 80)) | VALUES,
)
def test_any_header_is_read_or_refused(tmp_path_factory, dtype, shape, offsets):
    folder = tmp_path_factory.mktemp("model")
    header = {"tensor": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    try:
        content = safetensors_bytes(header, bytes(72))
    except (TypeError, ValueError, RuntimeError):  # no JSON
        return
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    code = None
    try:
        checkpoint = open_checkpoint(str(folder))
    except UserError as error:
        code = error.code
    if code is not None:
        assert code == "invalid_checkpoint"
    elif hasattr(torch, checkpoint.tensors["tensor"].dtype):
        shape = checkpoint.tensors["tensor"].shape
        assert checkpoint.read("tensor", whole(shape)).shape == shape


def test_generation_config(tmp_path):
    write_single(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(str(tmp_path)).generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("{")
    assert_refused(tmp_path, "generation_config.json")


def test_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    for model in (tmp_path / "absent", tmp_path / "absent.gguf", tmp_path / "weights.bin", "x" * 300, "a\0b"):
        assert_refused(model, repr(str(model)), "safetensors", ".gguf", "builtin")


def test_builtin_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused("builtin", "longhelix download builtin")


def test_config_missing(tmp_path):
    write_single(tmp_path)
    (tmp_path / "config.json").unlink()
    assert_refused(tmp_path, "config.json is missing")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe\xff", b"[" * 100_000])
def test_config_garbage(content, tmp_path):
    write_single(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    assert_refused(tmp_path, str(tmp_path / "config.json"), "JSON")


def test_no_safetensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert_refused(tmp_path, str(tmp_path), "model.safetensors.index.json", "pickled")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["embed"]}'])
def test_index_garbage(content, tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert_refused(tmp_path, "model.safetensors.index.json")


def test_shard_missing(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert_refused(tmp_path, "b.safetensors is missing")


@pytest.mark.parametrize("shard", ["../b.safetensors", "/etc/b.safetensors", "sub/b.safetensors", "", "..", 7])
def test_shard_outside_folder(shard, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_sharded(folder)
    (tmp_path / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub" / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    write_index(folder, SHARDS | {"q_proj": shard, "norm": shard})
    assert_refused(folder, str(folder))


def test_index_names_absent_tensor(tmp_path):
    write_sharded(tmp_path)
    write_index(tmp_path, SHARDS | {"lm_head": "b.safetensors"})
    assert_refused(tmp_path, str(tmp_path / "b.safetensors"), "does not hold lm_head")


def test_tensor_in_two_shards(tmp_path):
    write_sharded(tmp_path)
    save_file({name: TENSORS[name] for name in ("q_proj", "norm", "ids")}, tmp_path / "b.safetensors")
    assert_refused(tmp_path, str(tmp_path / "b.safetensors"), "holds ids", "in a.safetensors")


def test_tensor_not_in_index(tmp_path):
    write_sharded(tmp_path)
    write_index(tmp_path, {name: shard for name, shard in SHARDS.items() if name != "norm"})
    assert_refused(tmp_path, str(tmp_path / "b.safetensors"), "holds norm", "in no file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read now (cannot mmap an empty file)"),
        (b"x" * 100, "cannot be read now"),
        ({"other": torch.zeros(8, 6)}, "was changed while it was opened"),
        ({"embed": torch.zeros(8, 12, dtype=torch.bfloat16)}, "was changed while it was opened"),
        ({"embed": torch.zeros(6, 8)}, "was changed while it was opened"),
    ],
    ids=["empty", "garbage", "other name", "other dtype", "other shape"],
)
def test_safetensors_replaced_after_they_were_found_sound(content, words, tmp_path):
    checkpoint = open_checkpoint(str(write_single(tmp_path)))
    file = tmp_path / "model.safetensors"
    if isinstance(content, dict):
        save_file(content, file)
    else:
        file.write_bytes(content or b"")
    with pytest.raises(UserError) as refused:
        checkpoint.read("embed", whole((8, 6)))
    assert refused.value.code == "invalid_checkpoint"
    assert words in str(refused.value)


def test_no_more_of_a_tensor_is_asked_for_than_follows_in_it(tmp_path, monkeypatch):
    checkpoint, asked = open_checkpoint(str(write_single(tmp_path))), []
    monkeypatch.setattr(safetensors_checkpoint._MappedShard, "_read_ahead", lambda _, *place: asked.append(place[1]))
    row_bytes = 6 * 4
    for slices, bytes_ahead in (
        ((slice(0, 3), slice(0, 6)), 3 * row_bytes),
        ((slice(3, 6), slice(0, 6)), 2 * row_bytes),
        ((slice(6, 8), slice(0, 6)), 0),
        ((slice(0, 4), slice(2, 3)), 4 * row_bytes),
    ):
        checkpoint.read("embed", slices)
        assert asked.pop() == bytes_ahead
    checkpoint.read("embed", (slice(2, 2), slice(0, 6)))
    checkpoint.read("embed", (slice(0, 8), slice(6, 6)))
    assert not asked


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_safetensors_truncated(write, tmp_path):
    write(tmp_path)
    path = max(tmp_path.glob("*.safetensors"))
    content = path.read_bytes()
    for size in (0, 4, 8, 40, len(content) - 100, len(content) - 1):
        path.write_bytes(content[:size])
        assert_refused(tmp_path, str(path))


def safetensors_bytes(header: object, data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def f32(begin: int, end: int, size: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [size], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xff" * 64, id="noise"),
        pytest.param(struct.pack("<Q", 8) + b"not json", id="not-json"),
        pytest.param(safetensors_bytes(["a"], b""), id="not-an-object"),
        pytest.param(safetensors_bytes({"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, bytes(12)), id="overlap"),
        pytest.param(safetensors_bytes({"a": f32(0, 8, 2), "b": f32(0, 8, 2)}, bytes(8)), id="same-bytes"),
        pytest.param(safetensors_bytes({"a": f32(0, 8, 2), "b": f32(12, 20, 2)}, bytes(20)), id="hole"),
        pytest.param(safetensors_bytes({"a": f32(0, 8, 3)}, bytes(8)), id="shape-against-bytes"),
    ],
)
def test_safetensors_garbage(content, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, str(tmp_path / "model.safetensors"))


def test_opening_needs_no_torch(tmp_path):
    folder, file = tmp_path / "model", tmp_path / "tiny.gguf"
    folder.mkdir()
    write_sharded(folder)
    write_gguf(file)
    program = """
import sys
from longhelix.compute.models.model_files import open_checkpoint
for model in sys.argv[1:]:
    assert open_checkpoint(model).tensors
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(folder), str(file)], check=True)


# A tiny llama of width 64: four heads of 16, two of them for keys.
QUANT = gguf.GGMLQuantizationType
METADATA = {"llama.embedding_length": 64, "llama.attention.head_count": 4}


def random_float32(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def write_gguf(path: Path, tensors=None, metadata=METADATA, architecture="llama", endian="LITTLE") -> None:
    """`tensors`: {name: (float32 values, type to store them as)}."""
    writer = gguf.GGUFWriter(str(path), architecture, endianess=gguf.GGUFEndian[endian])
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    if tensors is None:
        tensors = {"output_norm.weight": (random_float32(64), QUANT.F32)}
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: np.ndarray, head_size: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q_proj and k_proj."""
    heads = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def test_gguf_written_here(tmp_path):
    path = tmp_path / "tiny.gguf"
    q, k, bias, down = random_float32(64, 64), random_float32(32, 64), random_float32(64), random_float32(64, 96)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(
        path,
        {
            "blk.10.attn_q.weight": (interleaved(q, 16), QUANT.F32),
            "blk.10.attn_q.bias": (interleaved(bias, 16), QUANT.F32),
            "blk.10.attn_k.weight": (interleaved(k, 16), QUANT.F16),
            "blk.10.ffn_down.weight": (down, QUANT.Q8_0),
            "output.weight": (k, QUANT.BF16),
            "rope_freqs.weight": (factors, QUANT.F32),
        },
    )
    checkpoint = open_checkpoint(str(path))
    layer = "model.layers.10"
    down_as_stored = gguf.quants.dequantize(gguf.quants.quantize(down, QUANT.Q8_0), QUANT.Q8_0)
    expected = {
        f"{layer}.self_attn.q_proj.weight": ("float32", torch.from_numpy(q)),
        f"{layer}.self_attn.q_proj.bias": ("float32", torch.from_numpy(bias)),
        f"{layer}.self_attn.k_proj.weight": ("float16", torch.from_numpy(k).half()),
        f"{layer}.mlp.down_proj.weight": ("Q8_0", torch.from_numpy(down_as_stored)),
        "lm_head.weight": ("bfloat16", torch.from_numpy(k).bfloat16()),
    }
    assert checkpoint.tensors == {
        name: TensorInfo(name, tuple(tensor.shape), dtype) for name, (dtype, tensor) in expected.items()
    }
    assert checkpoint.rope_factors == tuple(factors.tolist())
    assert checkpoint.metadata["llama.embedding_length"] == 64
    for name, (_, tensor) in expected.items():
        for rows in (slice(0, len(tensor)), slice(16, 32), slice(16, 16)):
            slices = (rows, *whole(tensor.shape[1:]))
            torch.testing.assert_close(checkpoint.read(name, slices), tensor[slices], rtol=0, atol=0)
        if tensor.ndim == 2:
            # Columns inside one block, and across blocks of 32.
            for columns in (slice(3, 17), slice(30, 61)):
                slices = (slice(16, 32), columns)
                torch.testing.assert_close(checkpoint.read(name, slices), tensor[slices], rtol=0, atol=0)
    part = checkpoint.read(f"{layer}.self_attn.q_proj.weight", (slice(5, 43), slice(0, 64)))  # no whole heads
    torch.testing.assert_close(part, torch.from_numpy(q)[5:43], rtol=0, atol=0)


def test_gguf_key_length_is_head_size(tmp_path):
    q = random_float32(64, 64)
    write_gguf(
        tmp_path / "tiny.gguf",
        {"blk.0.attn_q.weight": (interleaved(q, 32), QUANT.F32)},
        METADATA | {"llama.attention.key_length": 32},
    )
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    read = checkpoint.read("model.layers.0.self_attn.q_proj.weight", (slice(32, 64), slice(0, 64)))
    torch.testing.assert_close(read, torch.from_numpy(q)[32:], rtol=0, atol=0)
    assert checkpoint.rope_factors is None


@pytest.fixture(scope="module")
def builtin():
    checkpoint = open_checkpoint("builtin")
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


def test_builtin_equals_transformers(builtin, monkeypatch):
    with torch.device("meta"):
        model = LlamaForCausalLM(builtin_config())
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))  # asked 397 times
    # `from_pretrained` itself would need the accelerate package for a GGUF file.
    reference = load_gguf_checkpoint(builtin.path, return_tensors=True, model_to_load=model)["tensors"]
    # The embedding is tied: the file has no lm_head of its own.
    assert builtin.tensors.keys() == reference.keys() == model.state_dict().keys() - {"lm_head.weight"}
    for name, info in builtin.tensors.items():
        assert info.shape == tuple(reference[name].shape)
        torch.testing.assert_close(builtin.read(name, whole(info.shape)), reference[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("model.embed_tokens.weight", (slice(1000, 3500), slice(0, 576))),
        ("model.embed_tokens.weight", (slice(49151, 49152), slice(100, 101))),
        ("model.layers.0.self_attn.q_proj.weight", (slice(192, 384), slice(0, 576))),
        ("model.layers.7.self_attn.k_proj.weight", (slice(64, 128), slice(33, 500))),
        ("model.layers.7.self_attn.o_proj.weight", (slice(0, 576), slice(192, 384))),
        ("model.layers.29.mlp.down_proj.weight", (slice(5, 300), slice(500, 1011))),
        ("model.layers.29.mlp.gate_proj.weight", (slice(768, 1536), slice(0, 576))),
        ("model.layers.7.self_attn.o_proj.weight", (slice(0, 576), slice(576, 576))),
        ("model.layers.7.self_attn.q_proj.weight", (slice(576, 576), slice(0, 576))),
        ("model.norm.weight", (slice(10, 20),)),
    ],
)
def test_builtin_slices(builtin, name, slices):
    full = builtin.read(name, whole(builtin.tensors[name].shape))
    torch.testing.assert_close(builtin.read(name, slices), full[slices], rtol=0, atol=0)


def test_gguf_truncated(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    assert open_checkpoint(str(path)).tensors
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert_refused(path, str(path))


def test_gguf_says_what_the_package_of_the_format_says(builtin):
    """All metadata but the reader's own, and the places of all tensors."""
    reader = gguf.GGUFReader(builtin.path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    ours = GgufFile(builtin.path).metadata
    packed = {name: value.tolist() for name, value in ours.items() if isinstance(value, array)}
    assert {**ours, **packed} == fields
    file = GgufFile(builtin.path)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.kind, ours.shape) == (theirs.tensor_type, tuple(reversed(theirs.shape.tolist())))
        assert ours.data.nbytes == theirs.n_bytes
        assert ours.data.ctypes.data - file._bytes.ctypes.data == theirs.data_offset


def test_gguf_garbage(tmp_path):
    path = tmp_path / "tiny.gguf"
    for content in (b"\xff" * 4096, bytes(4096), b"GGUF" + b"\xff" * 4096):
        path.write_bytes(content)
        assert_refused(path, str(path))


@pytest.mark.parametrize("offset", [64, 2**40, 2**64 - 64])
def test_gguf_tensor_outside_file(offset, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    # After the name come the dim count, one dim, the type, and the offset, which is 0.
    info = b"output_norm.weight" + struct.pack("<IQI", 1, 64, QUANT.F32)
    content = path.read_bytes()
    assert content.count(info + bytes(8)) == 1
    path.write_bytes(content.replace(info + bytes(8), info + struct.pack("<Q", offset)))
    assert_refused(path, str(path))


def test_gguf_of_other_architecture(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture="gpt2")
    assert_refused(path, str(path), "'gpt2'", '"llama"')


def test_gguf_big_endian(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, endian="BIG")
    assert_refused(path, str(path), "big-endian")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"llama.embedding_length": 64},
        METADATA | {"llama.attention.head_count": 0},
        METADATA | {"llama.embedding_length": 0},
        METADATA | {"llama.attention.key_length": 15},
    ],
)
def test_gguf_without_head_size(metadata, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, metadata=metadata)
    assert_refused(path, str(path), "llama.attention.key_length")


@pytest.mark.parametrize("name", ["blk.0.ffn_inp.weight", "output_norm.scale", "blk.0.output.weight"])
def test_gguf_unknown_tensor(name, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {name: (random_float32(64), QUANT.F32)})
    assert_refused(path, str(path), name)
