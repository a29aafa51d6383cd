"""Blocks of GGUF files as packed rows: the numbers that the gguf package reads, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

import gguf_packing
from longhelix.compute.kernels import native
from longhelix.compute.kernels.packed_rows import PackedRows, repacked
from longhelix.compute.models.gguf_packing import pack
from longhelix.spec.gguf_quantisation import GGUF_FORMATS, gguf_quantisation

pytestmark = pytest.mark.unit
is_native = pytest.mark.skipif(native.module is None, reason="the native kernels were not built")

# Where the bytes of the float16 numbers of a block begin.
FLOATS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(kind, rows, blocks):
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    for start in FLOATS[kind]:
        raw[..., start : start + 2] = generator.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = generator.integers(100, 140, (rows, blocks))
    return raw


@is_native
@pytest.mark.parametrize("kind", GGUF_FORMATS)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (2, 3), (37, 2), (16, 5)])
def test_bytes_are_those_of_the_reference(kind, outputs, blocks):
    """Also those of some blocks of each row, as a rank's share of the inputs."""
    raw_OBX = torch.from_numpy(random_blocks(kind, outputs, blocks + 2))
    depth = blocks * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    for first in range(3):
        part_OBX = raw_OBX[:, first : first + blocks]
        found, expected = (PackedRows.empty(GGUF_FORMATS[kind], outputs, depth) for _ in range(2))
        found.buffer.fill_(0xA5)
        expected.buffer.fill_(0xA5)
        pack(part_OBX, kind, found)
        gguf_packing.pack(part_OBX, kind, expected)
        assert torch.equal(found.buffer, expected.buffer)


def packed(kind):
    """Packed rows of three blocks, and their numbers."""
    raw = random_blocks(kind, 5, 3)
    numbers_OI = torch.from_numpy(dequantize(raw.reshape(5, -1), GGMLQuantizationType[kind]))
    rows = PackedRows.empty(GGUF_FORMATS[kind], *numbers_OI.shape)
    pack(torch.from_numpy(raw), kind, rows)
    return rows, numbers_OI


def cuts(depth):
    """Inputs that begin and end inside of blocks, superblocks, and bytes."""
    return [slice(0, depth), slice(16, depth - 16), slice(depth // 3, depth), slice(7, depth // 2 + 5),
            slice(depth // 3 + 3, depth // 3 + 4), slice(depth - 3, depth)]  # fmt: skip


@is_native
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_numbers_are_those_of_the_file(kind):
    rows, numbers_OI = packed(kind)
    assert torch.equal(rows.numbers(), numbers_OI)
    for cut in cuts(rows.depth):
        part = rows.cut(cut)
        assert torch.equal(part.numbers(), numbers_OI[:, cut])
        assert sum(part.row_bytes) == part.format.weight_row_bytes(part.depth, part.lead)
        again = part.cut(slice(1, part.depth))
        assert torch.equal(again.numbers(), numbers_OI[:, cut][:, 1:])


@is_native
@pytest.mark.parametrize("kind", K_QUANTS)
def test_one_format_has_the_numbers_of_all_k_quants(kind):
    rows, numbers_OI = packed(kind)
    for cut in cuts(rows.depth):
        part = repacked(rows.cut(cut), "any_k")
        assert part.dtype == "any_k"
        assert torch.equal(part.numbers(), numbers_OI[:, cut])


def kept(kinds):
    quantisation = gguf_quantisation(kinds)
    return {module: storage and storage.kept for module in kinds if [storage := quantisation.storage_of(module)]}


def test_weights_that_lie_together_are_kept_in_one_format():
    at = "model.layers.0."
    assert kept(
        {
            "model.embed_tokens": "Q6_K",
            f"{at}self_attn.q_proj": "Q4_K",
            f"{at}self_attn.k_proj": "Q4_K",
            f"{at}self_attn.v_proj": "Q6_K",
            f"{at}self_attn.o_proj": "Q4_K",
            f"{at}mlp.gate_proj": "Q4_0",
            f"{at}mlp.up_proj": "F16",
            f"{at}mlp.down_proj": "Q6_K",
            "model.layers.1.self_attn.q_proj": "F16",
            "model.layers.1.self_attn.k_proj": "F16",
            "model.layers.1.self_attn.o_proj": "BF16",
            "model.layers.1.mlp.gate_proj": "F32",
            "model.layers.1.mlp.up_proj": "BF16",
            "model.layers.2.mlp.gate_proj": "IQ2_XXS",
            "model.layers.2.mlp.up_proj": "Q6_K",
        }
    ) == {
        "model.embed_tokens": "q6_k",
        f"{at}self_attn.q_proj": "any_k",
        f"{at}self_attn.k_proj": "any_k",
        f"{at}self_attn.v_proj": "any_k",
        f"{at}self_attn.o_proj": "q4_k",
        f"{at}mlp.gate_proj": "float32",
        f"{at}mlp.up_proj": "float32",
        f"{at}mlp.down_proj": "q6_k",
        "model.layers.1.self_attn.q_proj": "float16",
        "model.layers.1.self_attn.k_proj": "float16",
        "model.layers.1.self_attn.o_proj": None,
        "model.layers.1.mlp.gate_proj": "float32",
        "model.layers.1.mlp.up_proj": "float32",
        "model.layers.2.mlp.gate_proj": None,
        "model.layers.2.mlp.up_proj": "q6_k",
    }


def test_experts_of_a_layer_are_kept_in_one_format():
    at = "model.layers.3.mlp.experts."
    kinds = {f"{at}{expert}.{name}": "Q4_K" for expert in range(3) for name in ("gate_proj", "up_proj", "down_proj")}
    assert set(kept(kinds).values()) == {"q4_k"}
    assert set(kept(kinds | {f"{at}1.down_proj": "Q5_K"}).values()) == {"any_k"}
    shared = {"model.layers.3.mlp.shared_experts.up_proj": "Q8_0"}
    assert kept(kinds | shared) == dict.fromkeys(kinds, "q4_k") | dict.fromkeys(shared, "q8_0")
    numbers = {module: "BF16" if "down" in module else "F16" for module in kinds}
    assert set(kept(numbers).values()) == {"float32"}


def test_experts_of_a_layer_with_other_types_among_them_become_numbers():
    at = "model.layers.3.mlp.experts."
    mixed = {f"{at}0.gate_proj": "Q4_K", f"{at}0.down_proj": "Q5_0"}
    quantisation = gguf_quantisation(mixed | {"lm_head": "Q6_K"})
    assert [quantisation.storage_of(module) for module in mixed] == [None, None]
    assert quantisation.plain.names == set(mixed)
    assert quantisation.storage_of("lm_head").kept == "q6_k"


def test_numbers_are_not_rounded():
    assert gguf_quantisation({"model.embed_tokens": "BF16", "lm_head": "BF16"}) is None
    quantisation = gguf_quantisation({"model.embed_tokens": "F16", "lm_head": "BF16"})
    assert quantisation.storage_of("model.embed_tokens").kept == "float16"
    assert quantisation.storage_of("lm_head") is None
    assert not quantisation.packs


def test_products_of_numbers_do_not_round_their_inputs():
    quantisation = gguf_quantisation({"model.embed_tokens": "F16", "lm_head": "Q8_0"})
    assert quantisation.packs
    rounding = quantisation.rounding_inputs("int8")
    assert rounding.storage_of("lm_head").rounds_inputs
    assert rounding.storage_of("model.embed_tokens") == quantisation.storage_of("model.embed_tokens")


def test_without_numbers_only_codes_are_left():
    """So GPUs keep them, whose products have one dtype."""
    together = {"model.layers.0.self_attn.q_proj": "F16", "model.layers.0.self_attn.k_proj": "Q8_0"}
    quantisation = gguf_quantisation({"model.embed_tokens": "F16", "lm_head": "Q8_0"} | together).without_numbers()
    assert quantisation.storage_of("lm_head").kept == "q8_0"
    assert [quantisation.storage_of(module) for module in ("model.embed_tokens", *together)] == [None] * 3
    assert gguf_quantisation({"lm_head": "F16"}).without_numbers() is None


def test_routers_of_numbers_have_no_rule():
    """llama.cpp stores them in F32, but no product reads them."""
    kinds = {"model.layers.0.mlp.experts.0.up_proj": "Q4_K", "lm_head": "Q6_K"}
    routers = {"model.layers.0.mlp.gate": "F32", "model.layers.0.mlp.shared_expert_gate": "F32"}
    assert gguf_quantisation(kinds | routers) == gguf_quantisation(kinds)
    assert gguf_quantisation({"lm_head": "BF16"} | routers) is None
