"""GGUF files written byte by byte: the rarer sound ones are read, and damaged ones are refused in a sentence."""

import random
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from longhelix.compute.models.gguf_file import GgufFile
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

STRING, ARRAY, UINT32, BOOL = (GGUFValueType[name] for name in ("STRING", "ARRAY", "UINT32", "BOOL"))
F32, I32 = GGMLQuantizationType.F32, GGMLQuantizationType.I32
NUMBERS = {
    "UINT8": ("B", [0, 255]),
    "INT8": ("b", [-128, 127]),
    "UINT16": ("H", [0, 2**16 - 1]),
    "INT16": ("h", [-(2**15), 2**15 - 1]),
    "UINT32": ("I", [0, 2**32 - 1]),
    "INT32": ("i", [-(2**31), 2**31 - 1]),
    "FLOAT32": ("f", [-0.5, 2.0**100]),
    "BOOL": ("?", [False, True]),
    "UINT64": ("Q", [0, 2**64 - 1]),
    "INT64": ("q", [-(2**63), 2**63 - 1]),
    "FLOAT64": ("d", [-0.1, 2.0**1000]),
}
ENDLESS = [41, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
HOSTILE = "\x1b[31m" * 10_000


def string(text: str | bytes) -> bytes:
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def items(kind: int, *values: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def count_field(name: str, value: int) -> bytes:
    return field(name, UINT32, struct.pack("<I", value))


def tensor(name: str | bytes, *shape: int, kind: int = F32, at: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, at)


LLAMA = (
    field("general.architecture", STRING, string("llama")),
    count_field("llama.embedding_length", 64),
    count_field("llama.attention.head_count", 4),
)


@pytest.fixture
def written(tmp_path):
    """Writes a file; `data` is in its place for an alignment."""

    def write(fields=LLAMA, tensors=(), data=bytes(4096), version=3, alignment=32):
        header = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(fields)) + b"".join((*fields, *tensors))
        path = tmp_path / "tiny.gguf"
        path.write_bytes(header + bytes(-len(header) % alignment) + data)
        return path

    return write


def assert_refused(path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_checkpoint(str(path))
    assert caught.value.code == "invalid_checkpoint"
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    assert message.isprintable()
    assert len(message.removeprefix(str(path))) < 300


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type_are_read(version, written):
    fields, expected = [], {}
    for name, (code, values) in NUMBERS.items():
        packed = [struct.pack(f"<{code}", value) for value in values]
        fields += [field(name, GGUFValueType[name], packed[0])]
        fields += [field(f"{name}s", ARRAY, items(GGUFValueType[name], *packed))]
        expected |= {name: values[0], f"{name}s": values}
    fields += [field("text", STRING, string("ä")), field("texts", ARRAY, items(STRING, string("ä"), string("")))]
    nested = items(ARRAY, items(STRING, string("a"), string("b")), items(BOOL, b"\1", b"\0"), items(ARRAY))
    fields += [field("nested", ARRAY, nested)]
    expected |= {"text": "ä", "texts": ["ä", ""], "nested": [["a", "b"], [True, False], []]}
    found = GgufFile(written(fields, version=version)).metadata
    assert {key: list(value) if key.endswith("s") else value for key, value in found.items()} == expected
    assert type(found["BOOL"]) is bool


def test_an_array_of_numbers_takes_about_the_memory_of_its_bytes(written):
    path = written([field("a", ARRAY, struct.pack("<IQ", GGUFValueType.INT8, 2**20) + b"\x80" * 2**20)])
    tracemalloc.start()
    try:
        assert GgufFile(path).metadata["a"][-1] == -128
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()


def test_text_that_is_not_utf8_matters_only_where_it_is_read(written):
    author, name = field("general.author", STRING, string(b"J\xf6rg")), field(b"J\xf6rg", STRING, string(""))
    assert open_checkpoint(str(written([*LLAMA, author]))).metadata["general.author"] == b"J\xf6rg"
    assert_refused(written([field("general.architecture", STRING, string(b"\xff" * 1000))]), r"b'\xff", '"llama"')
    for path in (written([*LLAMA, name]), written(tensors=[tensor(b"J\xf6rg", 8)])):
        assert_refused(path, r"b'J\xf6rg'", "UTF-8")


@pytest.mark.parametrize("version", [0, 1, 4, 2**16])
def test_other_versions_are_refused_by_number(version, written):
    assert_refused(written(version=version), f"version {version}:", "version 2 or 3")


@pytest.mark.parametrize("length", ENDLESS)
def test_a_string_beyond_the_end_is_refused(length, written):
    endless = struct.pack("<Q", length) + bytes(40)
    for value in (endless, items(STRING, endless), items(STRING, string("a"), endless), items(STRING, endless, b"")):
        kind = STRING if value is endless else ARRAY
        assert_refused(written([field("a", kind, value)], data=b"", alignment=1), "ends too early, at byte")
    assert_refused(written([endless], data=b"", alignment=1), "ends too early, at byte")
    assert_refused(written(tensors=[endless], data=b"", alignment=1), "ends too early, at byte")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [GGUFValueType.INT32, STRING, ARRAY])
@pytest.mark.parametrize("count", [2**60, 2**64 - 1])
def test_an_endless_array_is_refused(kind, count, written):
    assert_refused(written([field("a", ARRAY, struct.pack("<IQ", kind, count))], data=b""), "ends too early, at byte")


def test_arrays_nested_too_deep_are_refused_by_the_key(written):
    assert_refused(written([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]), "'a'", "too deep")


def test_values_of_an_unknown_type_are_refused(written):
    for value in (field("a", 99, bytes(8)), field("a", ARRAY, struct.pack("<IQ", 99, 1))):
        assert_refused(written([value]), "type 99")


def test_what_is_there_twice_is_refused_by_name(written):
    assert_refused(written([LLAMA[1]] * 2), "'llama.embedding_length' occurs twice")
    assert_refused(written(tensors=[tensor("w", 8)] * 2), "tensor 'w' occurs twice")


@pytest.mark.parametrize("alignment", [8, 32, 64, 256])
def test_tensors_begin_where_the_alignment_says(alignment, written):
    numbers = np.arange(1, 129, dtype="<f4")
    fields = [count_field("general.alignment", alignment)] if alignment != 32 else []
    tensors = [tensor("a", 2, 16), tensor("b", 8, at=256)]
    for padding in range(0, alignment, 7):  # wherever the header ends
        path = written([*fields, field("a", STRING, string("x" * padding))], tensors, numbers.tobytes(), 3, alignment)
        found = GgufFile(path).tensors
        np.testing.assert_array_equal(found["a"].data.view("<f4"), numbers[:32].reshape(2, 16))
        np.testing.assert_array_equal(found["b"].data.view("<f4"), numbers[64:72])


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (UINT32, struct.pack("<I", 0), "is 0,"),
        (UINT32, struct.pack("<I", 48), "is 48,"),
        (GGUFValueType.INT32, struct.pack("<i", -32), "is -32,"),
        (GGUFValueType.FLOAT32, struct.pack("<f", 32.0), "is 32.0,"),
        (BOOL, b"\1", "is True,"),
        (STRING, string("32"), "is '32',"),
        (STRING, string(HOSTILE), r"is '\x1b[31m"),
        (ARRAY, items(UINT32, struct.pack("<I", 32)), "[32]"),
    ],
)
def test_an_alignment_that_is_no_power_of_two_is_refused(kind, value, words, written):
    path = written([field("general.alignment", kind, value)])
    assert_refused(path, "general.alignment", words, "power of two")


@pytest.mark.parametrize("num_dims", [0, 5, 65, 100_000])
def test_a_tensor_of_no_dims_or_too_many_is_refused_by_name(num_dims, written):
    assert_refused(written(tensors=[tensor("w", *[1] * num_dims)]), "'w'", f"{num_dims} dims")
    assert GgufFile(written(tensors=[tensor("w", 1, 2, 3, 4)])).tensors["w"].shape == (1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(0,), (2**64 - 1, 0), (0, 2**64 - 1), (2**64 - 1,) * 4])
def test_a_tensor_without_numbers_or_beyond_the_end_is_refused(shape, written):
    assert_refused(written(tensors=[tensor("w", *shape)]), *(["'w'", str(list(shape))] if 0 in shape else []))


def test_tensors_may_neither_overlap_nor_begin_between_two_places(written):
    for at in (0, 32):
        assert_refused(written(tensors=[tensor("v", 16, at=at), tensor("w", 16, at=0)]), "inside another tensor")
    for at in (4, 33):
        assert_refused(written(tensors=[tensor("w", 8, at=at)]), "'w'", f"byte {at}, which is not a multiple of 32")
    assert list(GgufFile(written(tensors=[tensor("v", 8, at=64), tensor("w", 16)])).tensors) == ["w", "v"]


@pytest.mark.parametrize(("kind", "words"), [(99, "type 99"), (I32, "I32")])
def test_a_tensor_of_a_type_that_cannot_be_read_is_refused_with_advice_that_helps(kind, words, written):
    assert_refused(
        written(tensors=[tensor("output_norm.weight", 64, kind=kind)]), "'output_norm.weight'", words, "Q8_0"
    )


@pytest.mark.parametrize("fields", [LLAMA, ()], ids=["first", "later"])
def test_a_part_of_a_split_model_without_its_name_is_refused_with_how_to_merge_it(fields, written):
    assert_refused(written([*fields, count_field("split.count", 3)]), "one part", "llama-gguf-split --merge")


def split_fields(part, count=3, tensors=4):
    return [
        count_field("split.no", part),
        count_field("split.count", count),
        count_field("split.tensors.count", tensors),
    ]


@pytest.fixture
def parts(written, tmp_path):
    """Three parts of a model with four tensors."""
    found = []
    for part in range(3):
        names = [f"blk.{part}.attn_norm.weight", *(["output_norm.weight"] if part == 2 else [])]
        tensors = [tensor(name, 8, at=32 * place) for place, name in enumerate(names)]
        data = np.full(16, part, "<f4").tobytes()
        path = written([*(LLAMA if part == 0 else ()), *split_fields(part)], tensors, data)
        found.append(path.rename(tmp_path / f"toy-0000{part + 1}-of-00003.gguf"))
    return found


def test_any_part_of_a_split_model_opens_all_parts(parts):
    for path in parts:
        checkpoint = open_checkpoint(str(path))
        assert (checkpoint.path, checkpoint.files) == (path, tuple(parts))
        assert checkpoint.metadata["general.architecture"] == "llama"
        norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)]
        assert sorted(checkpoint.tensors) == [*norms, "model.norm.weight"]
        for layer, name in enumerate(norms):
            assert checkpoint.read(name, (slice(0, 8),)).tolist() == [float(layer)] * 8


def test_a_split_model_with_a_part_missing_is_refused_by_name(parts):
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        assert_missing = pytest.raises(UserError, match=r"toy-00002-of-00003\.gguf is missing, .* the 3 parts")
        with assert_missing:
            open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (split_fields(0), "split.no is 0, not 1"),
        (split_fields(1, count=4), "split.count is 4, "),
        ([], "split.count is None"),
        (split_fields(1, tensors=5), "split.tensors.count is 5, not 4"),
        ([field("general.architecture", STRING, string("qwen2")), *split_fields(1)], "is 'qwen2', not 'llama'"),
    ],
    ids=["no", "count", "whole", "tensors", "architecture"],
)
def test_a_part_of_another_model_is_refused(fields, words, parts, written):
    written(fields, [tensor("blk.1.attn_norm.weight", 8)]).rename(parts[1])
    assert_refused_part(parts[0], parts[1], words)


def assert_refused_part(path, part, words):
    with pytest.raises(UserError) as caught:
        open_checkpoint(str(path))
    assert str(caught.value).startswith(f"{part} does not belong to a split model with the other files (")
    assert words in str(caught.value)


def test_parts_with_too_few_tensors_or_with_the_same_are_refused(parts, written):
    written(split_fields(1), []).rename(parts[1])
    assert_refused_part(parts[0], parts[0], "the parts have 3 tensors, not 4")
    written(split_fields(1), [tensor("blk.0.attn_norm.weight", 8)]).rename(parts[1])
    assert_refused_part(parts[0], parts[1], "'blk.0.attn_norm.weight'")


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_in_one_file_may_say_so(count, written):
    assert open_checkpoint(str(written([*LLAMA, count_field("split.count", count)]))).tensors == {}


def test_rope_frequencies_of_another_number_are_refused(written):
    assert open_checkpoint(str(written(tensors=[tensor("rope_freqs.weight", 8)]))).rope_factors == (0.0,) * 8
    assert_refused(written(tensors=[tensor("rope_freqs.weight", 1024)]), "rope_freqs", "[1024]", "head size 16")


def test_names_from_the_file_are_shown_short_and_printable(written):
    for path in (
        written([field("general.architecture", STRING, string(HOSTILE))]),
        written([field(HOSTILE, STRING, string(""))] * 2),
        written([field(HOSTILE, ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]),
        written(tensors=[tensor(HOSTILE, 8)]),
        written(tensors=[tensor(HOSTILE, 8)] * 2),
        written(tensors=[tensor(HOSTILE)]),
        written(tensors=[tensor(HOSTILE, 0)]),
        written(tensors=[tensor(HOSTILE, 8, at=1)]),
        written(tensors=[tensor("w", 8), tensor(HOSTILE, 8)]),
        written(tensors=[tensor(HOSTILE, 8, kind=99)]),
        written(tensors=[tensor(HOSTILE, 8, kind=I32)]),
    ):
        assert_refused(path, r"\x1b[31m")


@pytest.mark.slow
def test_any_damage_to_the_header_is_refused_or_does_no_harm(written):
    tokens, scores = [string(token) for token in "abc"], [struct.pack("<f", score) for score in (-1, -2, -3)]
    lists = {"tokens": items(STRING, *tokens), "scores": items(GGUFValueType.FLOAT32, *scores)}
    lists["nested"] = items(ARRAY, items(ARRAY, items(STRING, *tokens)), items(BOOL, b"\1"))
    fields = [*LLAMA, *(field(f"tokenizer.ggml.{name}", ARRAY, value) for name, value in lists.items())]
    path = written(fields, [tensor("output_norm.weight", 64), tensor("token_embd.weight", 2, 64, at=256)], bytes(768))
    sound, chance = path.read_bytes(), random.Random(0)
    assert open_checkpoint(str(path)).tensors
    for _ in range(3000):
        content = bytearray(sound)
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(sound) - 768)] = chance.choice([0, 1, 8, 9, 0x7F, 0x80, 0xFF])
        path.write_bytes(content)
        with suppress(UserError):
            open_checkpoint(str(path))
