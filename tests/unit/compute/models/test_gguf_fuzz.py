"""Damaged GGUF files of models with packed weights: they load, or are refused in one sentence, in little memory."""

import functools
import struct
import tracemalloc
import warnings
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, TokenType
from hypothesis import assume, given
from hypothesis import strategies as st
from test_gguf_file import ARRAY, HOSTILE, STRING, UINT32, field, items, string, tensor
from test_gguf_packing import random_blocks
from tokenizers import pre_tokenizers

from gguf_metadata import BY_FAMILY
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.sampling_defaults import gguf_generation_config, sampling_defaults
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError
from longhelix.spec.gguf_quantisation import GGUF_FORMATS
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

KINDS = [*GGUF_FORMATS, "F32", "F16", "BF16", "mixed"]
LAYOUTS = [Layout(), Layout(kvp=2, tpa=2), Layout(tpa=4)]
OPTIONS = EngineOptions(device="cpu", kv_cache_tokens=256, block_tokens=16)
HIDDEN, ALIGNMENT = 256, 32
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# What the header's reader may hold besides what it read, and what the engine takes for any model.
SPARE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. `data`: the bytes that the file has for it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes
    shift: int = 0  # of the place that the header says

    def header(self, at: int) -> bytes:
        return tensor(self.name, *self.shape, kind=self.kind, at=(at + self.shift) % 2**64)


@dataclass(frozen=True)
class File:
    """A GGUF file before it is written. `fields`: values with their types by name, in bytes."""

    fields: tuple[tuple[str, int, bytes], ...]
    tensors: tuple[Tensor, ...]
    version: int = 3
    more_fields: int = 0  # that the header counts, but the file does not have
    more_tensors: int = 0

    def written(self) -> bytes:
        at, places = 0, []
        for each in self.tensors:
            places.append(at)
            at += -(-len(each.data) // ALIGNMENT) * ALIGNMENT
        counts = (len(self.tensors) + self.more_tensors) % 2**64, (len(self.fields) + self.more_fields) % 2**64
        header = struct.pack("<4sIQQ", b"GGUF", self.version, *counts)
        header += b"".join(field(name, kind, value) for name, kind, value in self.fields)
        header += b"".join(each.header(place) for each, place in zip(self.tensors, places, strict=True))
        data = b"".join(each.data + bytes(-len(each.data) % ALIGNMENT) for each in self.tensors)
        return header + bytes(-len(header) % ALIGNMENT) + data

    def parts(self) -> list["File"]:
        """Return the same model in two files."""
        half, found = len(self.tensors) // 2, []
        for number, some in enumerate((self.tensors[:half], self.tensors[half:])):
            counts = {"split.no": number, "split.count": 2, "split.tensors.count": len(self.tensors)}
            fields = self.fields if number == 0 else ()
            found.append(replace(self, fields=(*fields, *(typed(*each) for each in counts.items())), tensors=some))
        return found


def typed(name, value):
    """Return the field of a value."""
    kinds = {bool: ("BOOL", "<?"), int: ("UINT32", "<I"), float: ("FLOAT32", "<f")}
    if isinstance(value, str):
        return name, STRING, string(value)
    kind, code = kinds[type(value)]
    return name, GGUFValueType[kind], struct.pack(code, value)


def tokenizer_fields():
    tokens = [string(token) for token in [*ALPHABET, "ab", "<s>", "</s>"]]
    kinds = [TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL] * 2
    yield typed("tokenizer.ggml.model", "gpt2")
    yield typed("tokenizer.ggml.pre", "llama-bpe")
    yield "tokenizer.ggml.tokens", ARRAY, items(STRING, *tokens)
    yield "tokenizer.ggml.token_type", ARRAY, items(GGUFValueType.INT32, *(struct.pack("<i", kind) for kind in kinds))
    yield "tokenizer.ggml.merges", ARRAY, items(STRING, string("a b"))
    yield typed("tokenizer.ggml.bos_token_id", len(tokens) - 2)
    yield typed("tokenizer.ggml.eos_token_id", len(tokens) - 1)
    yield typed("tokenizer.chat_template", "{{ messages[0].content }}")
    yield typed("general.sampling.temp", 0.5)


_HEADS, _KV_HEADS, _SIZE, _VOCAB = 4, 2, 64, len(ALPHABET) + 3
_GROUPED = {
    "attn_q": (_HEADS * _SIZE, HIDDEN), "attn_k": (_KV_HEADS * _SIZE, HIDDEN), "attn_v": (_KV_HEADS * _SIZE, HIDDEN),
    "attn_output": (HIDDEN, _HEADS * _SIZE),
}  # fmt: skip
_NORMS = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
_EXPERTS = {"ffn_gate_inp": (2, HIDDEN)} | {f"ffn_{name}_exps": (2, HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
_SHARED = {f"ffn_{name}_shexp": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
SHAPES = {
    "llama": _GROUPED | _NORMS | {f"ffn_{name}": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")},
    "qwen3_moe": _GROUPED | _NORMS | _EXPERTS | {"attn_q_norm": (_SIZE,), "attn_k_norm": (_SIZE,)},
    "deepseek_v3": _NORMS | _EXPERTS | _SHARED | {
        "attn_q": (_HEADS * _SIZE, HIDDEN), "attn_kv_a_mqa": (256 + 32, HIDDEN), "attn_kv_a_norm": (256,),
        "attn_k_b": (_HEADS, 256, 32), "attn_v_b": (_HEADS, 64, 256), "attn_output": (HIDDEN, _HEADS * 64),
        "exp_probs_b": (2,),
    },
}  # fmt: skip
CHANGES = {
    "llama": {"feed_forward_length": HIDDEN, "rope.dimension_count": _SIZE},
    "qwen3_moe": {"attention.key_length": _SIZE, "expert_feed_forward_length": HIDDEN},
    "deepseek_v3": {
        "feed_forward_length": HIDDEN, "expert_feed_forward_length": HIDDEN, "attention.q_lora_rank": None,
        "attention.kv_lora_rank": 256, "attention.key_length": 288, "attention.value_length": 256,
        "attention.key_length_mla": 64, "attention.value_length_mla": 64, "rope.dimension_count": 32,
        "leading_dense_block_count": 0, "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1,
        "attention.head_count_kv": 1,
    },
}  # fmt: skip
COMMON = {
    "block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS, "vocab_size": _VOCAB, "expert_count": 2, "expert_used_count": 1,
}  # fmt: skip


@functools.cache
def sound(family: str, kind: str) -> File:
    """A model of one layer with all its matrices of a kind. "mixed": as llama.cpp mixes K-quants."""
    architecture, keys = BY_FAMILY[family]
    common = {name: value for name, value in COMMON.items() if name in keys}
    settings = keys | common | CHANGES[family]
    fields = [typed("general.architecture", architecture)]
    fields += [typed(f"{architecture}.{name}", value) for name, value in settings.items() if value is not None]
    names = {"token_embd.weight": (_VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    names |= {f"blk.0.{name}.{'bias' if name == 'exp_probs_b' else 'weight'}": shape
              for name, shape in SHAPES[family].items()}  # fmt: skip
    return File((*fields, *tokenizer_fields()), tuple(_tensor(name, shape, kind) for name, shape in names.items()))


def _tensor(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    if len(shape) == 1 or "gate_inp" in name:
        kind = "F32"
    elif kind == "mixed":
        kind = "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else "Q4_K"
    if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
        kind = "Q8_0"
    number = GGMLQuantizationType[kind]
    rows = torch.Size(shape[:-1]).numel()
    block, block_bytes = GGML_QUANT_SIZES[number]
    if kind in GGUF_FORMATS:
        return Tensor(name, shape, number, random_blocks(kind, rows, shape[-1] // block).tobytes())
    return Tensor(name, shape, number, bytes(rows * shape[-1] * block_bytes))


def outcome(path, layout: Layout) -> str | None:
    """Load a model as the engine does. Returns the message if it is refused."""
    size = sum(part.stat().st_size for part in path.parent.glob("*.gguf"))
    tracemalloc.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = open_checkpoint(str(path))
            config = resolve(checkpoint, layout, OPTIONS)
            Tokenizer.from_gguf(checkpoint.metadata)
            sampling_defaults(gguf_generation_config(checkpoint.metadata))
            held = max(config.weight_bytes(rank) for rank in range(layout.num_ranks))
            assert held < 4 * size + SPARE_BYTES  # F16 in float32
            parameters = declare(config.spec, layout, layout.num_ranks - 1)
            weights = Weights(checkpoint, parameters, torch.bfloat16, "bfloat16", torch.device("cpu"))
            for name in weights.unused:
                weights.product(name) if weights.is_packed(name) else weights.take(name)
    except UserError as error:
        message = str(error).replace(str(path.parent), "")
        assert message.isprintable(), message
        assert 10 < len(message) < 700, message
        return message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * size + SPARE_BYTES
    return None


def write(folder, files: list[File], content: bytes | None = None):
    """Write the files of a model, the first with other bytes if they are given. Returns the path of the first."""
    for old in folder.glob("*.gguf"):
        old.unlink()
    paths = [folder / (f"toy-{number:05}-of-{len(files):05}.gguf" if len(files) > 1 else "toy.gguf")
             for number in range(1, len(files) + 1)]  # fmt: skip
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file.written())
    if content is not None:
        paths[0].write_bytes(content)
    return paths[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all examples."""
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.parametrize("family", SHAPES)
def test_the_files_that_are_damaged_here_are_sound(family, folder):
    for kind in KINDS:
        assert outcome(write(folder, [sound(family, kind)]), LAYOUTS[1]) is None
    old = replace(sound(family, "mixed"), version=2)
    for files in ([old], old.parts()):
        assert outcome(write(folder, files), LAYOUTS[0]) is None


LARGE = st.sampled_from(
    [0, 1, 2, 3, 7, 31, 33, 255, 257, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
)
NAMES = st.sampled_from(
    [
        *("", "x", HOSTILE, "output.weight", "rope_freqs.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"),
        *("blk.0.attn_q.bias", "blk.0.attn_kv_b.weight", "blk.99999999999.ffn_up.weight"),
    ]
)


WHOLE = [typed("", value)[1:] for value in (True, 0, 1, 2, 3, 5, 64, 1000, 2**31, 2**32 - 1, 0.0, -1.0, 2.5, 1e38)]
WHOLE += [
    typed("", value)[1:] for value in (float("nan"), float("inf"), "", "x", "none", "yarn", "gpt2", "llama", HOSTILE)
]
WHOLE += [(ARRAY, items(UINT32)), (ARRAY, items(UINT32, bytes(4))), (ARRAY, items(STRING, string("x"), string("x")))]


@st.composite
def field_values(draw):
    """A type and the bytes of a value, which may not be of the type."""
    if draw(st.integers(0, 2)):
        return draw(st.sampled_from(WHOLE))
    kind = draw(st.sampled_from([*GGUFValueType, 99]))
    if draw(st.booleans()):
        return kind, draw(st.binary(max_size=40))
    number = struct.pack("<Q", draw(LARGE))
    each = [
        number,
        string("x"),
        items(UINT32, number[:4]),
        struct.pack("<IQ", ARRAY, 1) * 50,
        items(STRING, string("x")),
    ]
    return kind, draw(st.sampled_from(each))


def damaged_fields(draw, file: File) -> File:
    fields = list(file.fields)
    place = draw(st.integers(0, len(fields) - 1))
    name, kind, value = fields[place]
    match draw(st.sampled_from(["value", "number", "type", "name", "left out", "twice", "count", "cut"])):
        case "value":
            fields[place] = name, *draw(field_values())
        case "number":
            size = len(value) if kind != STRING else 8
            fields[place] = name, kind, struct.pack("<Q", draw(LARGE)).ljust(size, b"\0")[:size] + value[size:]
        case "type":
            fields[place] = name, draw(st.sampled_from([*GGUFValueType, 99])), value
        case "name":
            fields[place] = draw(NAMES | st.sampled_from([other for other, _, _ in fields])), kind, value
        case "left out":
            del fields[place]
        case "twice":
            fields.append(fields[place])
        case "count":
            return replace(file, more_fields=draw(st.sampled_from([-1, 1, 2**32, 2**63])))
        case "cut":
            fields[place] = name, kind, value[: draw(st.integers(0, len(value)))]
    return replace(file, fields=tuple(fields))


def damaged_tensors(draw, file: File) -> File:
    tensors = list(file.tensors)
    place = draw(st.integers(0, len(tensors) - 1))
    each = tensors[place]
    match draw(st.sampled_from(["kind", "shape", "dims", "place", "name", "left out", "twice", "count", "data"])):
        case "kind":
            tensors[place] = fitting(draw, replace(each, kind=draw(st.sampled_from([*GGMLQuantizationType, 99]))))
        case "shape":
            dim = draw(st.integers(0, len(each.shape) - 1))
            other = draw(LARGE | st.sampled_from([128, 256, 512, each.shape[dim] - 1, each.shape[dim] + 32]))
            tensors[place] = fitting(draw, replace(each, shape=(*each.shape[:dim], other, *each.shape[dim + 1 :])))
        case "dims":
            shapes = [each.shape[::-1], each.shape[1:], (1, *each.shape), (*each.shape, 1), each.shape * 2]
            tensors[place] = fitting(draw, replace(each, shape=draw(st.sampled_from(shapes))))
        case "place":
            tensors[place] = replace(each, shift=draw(LARGE | st.sampled_from([32, -32, 1 << 20])))
        case "name":
            tensors[place] = replace(each, name=draw(NAMES | st.sampled_from([other.name for other in tensors])))
        case "left out":
            del tensors[place]
        case "twice":
            tensors.append(each)
        case "count":
            return replace(file, more_tensors=draw(st.sampled_from([-1, 1, 2**32, 2**63])))
        case "data":
            tensors[place] = replace(each, data=draw(st.sampled_from([b"\xff", b"\x7f", b"\0"])) * len(each.data))
    return replace(file, tensors=tuple(tensors))


def filled(each: Tensor) -> Tensor:
    """Return the tensor with as many bytes as its kind and its shape say, unless these are many."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(each.kind)]
    size = prod(each.shape) // block * block_bytes
    return replace(each, data=(each.data * 9)[:size].ljust(size, b"\0")) if size < 2**20 else each


def fitting(draw, each: Tensor) -> Tensor:
    return each if each.kind not in GGML_QUANT_SIZES or draw(st.booleans()) else filled(each)


def others(each: Tensor) -> list[Tensor]:
    """Return the tensor with other kinds, shapes and places, each of which is wrong."""
    kinds = [kind for kind in ("Q2_K", "Q8_0", "I32", "IQ2_XXS") if GGMLQuantizationType[kind] != each.kind]
    shapes = [each.shape[1:], (*each.shape[:-1], each.shape[-1] + 32), (*each.shape[:-1], 0), (1, *each.shape, 1)]
    shapes += [(each.shape[0] + 1, *each.shape[1:]), (2**62, *each.shape[1:])]
    found = [filled(replace(each, kind=GGMLQuantizationType[kind])) for kind in kinds]
    found += [filled(replace(each, shape=shape)) for shape in shapes if shape]
    return [*found, replace(each, shift=-32), replace(each, shift=2**40), replace(each, shift=4)]


@pytest.mark.parametrize("family", SHAPES)
def test_each_tensor_of_another_kind_shape_or_place_is_refused(family, folder):
    file = sound(family, "Q4_K")
    for place, each in enumerate(file.tensors):
        for other in others(each):
            damaged = replace(file, tensors=(*file.tensors[:place], other, *file.tensors[place + 1 :]))
            message = outcome(write(folder, [damaged]), LAYOUTS[0])
            # All kinds can be read that can become numbers.
            assert message is not None or (other.shape == each.shape and other.shift == 0)


@pytest.mark.parametrize("count", [2**24, 2**31, 2**62])
def test_each_list_with_more_values_than_the_file_is_refused_in_little_memory(count, folder):
    file = sound("llama", "Q4_K")
    for place, (name, kind, value) in enumerate(file.fields):
        if kind in (ARRAY, STRING):
            at = 4 if kind == ARRAY else 0
            longer = name, kind, value[:at] + struct.pack("<Q", count) + value[at + 8 :]
            damaged = replace(file, fields=(*file.fields[:place], longer, *file.fields[place + 1 :]))
            assert outcome(write(folder, [damaged]), LAYOUTS[0]) is not None


@pytest.mark.parametrize("family", SHAPES)
@given(data=st.data())
def test_any_damage_is_refused_in_a_sentence_or_does_no_harm(family, data, folder):
    file = replace(sound(family, data.draw(st.sampled_from(KINDS))), version=data.draw(st.sampled_from([2, 3])))
    files = file.parts() if data.draw(st.booleans()) else [file]
    place = data.draw(st.integers(0, len(files) - 1))
    assume(files[place].tensors)
    how = data.draw(st.sampled_from(["fields", "fields", "tensors", "tensors", "both", "cut", "bytes"]))
    if how in ("fields", "both"):
        files[place] = damaged_fields(data.draw, files[place])
    if how in ("tensors", "both"):
        files[place] = damaged_tensors(data.draw, files[place])
    content = bytearray(files[0].written())
    match how:
        case "cut":
            del content[data.draw(st.integers(0, len(content))) :]
        case "bytes":
            end = len(content) - sum(len(each.data) for each in files[0].tensors)
            for at in data.draw(st.lists(st.integers(0, max(end, 1) - 1), max_size=4)):
                content[at] = data.draw(st.integers(0, 255))
    outcome(write(folder, files, bytes(content)), data.draw(st.sampled_from(LAYOUTS)))
