"""Quantised checkpoints equal transformers with the dequantised weights: logits and greedy tokens, in float32."""

import itertools
import json
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_equality import assert_equal, make_case

import oracle as oracles_of_families
from longhelix.compute.kernels.packed_rows import encoded
from packed_checkpoints import FORMS, HEAD, Form, make_packed_oracle

pytestmark = pytest.mark.dist


def changed(config, **fields):
    return type(config)(**(config.to_dict() | fields))


CONFIGS = {
    "llama": oracles_of_families.NATIVE_SIZES,  # dense, GQA
    "qwen3_moe": oracles_of_families.NATIVE_EXPERTS["native-qwen3_moe"],
    "deepseek_v3": changed(oracles_of_families.NATIVE_LATENTS, moe_intermediate_size=40),  # dense and experts, MLA
}
# KVP, TPA, EP, PP. Columns and heads of 144 and 192 are cut inside of all scale blocks.
GRIDS = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 2, 1),
    (3, 1, 1, 1),
    (2, 2, 2, 1),
    (4, 1, 1, 1),
    (1, 1, 1, 2),
]
CASES = list(itertools.product(CONFIGS, FORMS, GRIDS))
# In CI, every form, with some families and grids.
QUICK = {case for number, case in enumerate(CASES) if number % 9 == 0}
# Kimi's form packs only experts.
CASES = [case for case in CASES if case[:2] != ("llama", "kimi-int4")]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made = {}

    def oracle(family, form):
        if (family, form) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{form}")
            made[family, form] = make_packed_oracle(CONFIGS[family], FORMS[form], folder)
        return made[family, form]

    return oracle


@pytest.mark.parametrize(
    ("family", "form", "grid"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_packed_weights_equal_their_numbers(worlds, oracles, family, form, grid):
    kvp, tpa, ep, pp = grid
    oracle = oracles(family, form)
    if family == "llama" and ep > 1:
        ep = 1
    case = make_case(oracle, kvp, tpa, 7, "striped", ep=ep, pp=pp)
    assert_equal(oracle, worlds(prod((kvp, tpa, pp))).run(case))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny DeepSeek-V3 as R1 is published: shards with an index, and a layer of multi-token prediction at the end."""
    folder = tmp_path_factory.mktemp("r1")
    oracle = make_packed_oracle(oracles_of_families.NATIVE_LATENTS, FORMS["fp8-block"], folder)
    tensors = load_file(oracle.path / "model.safetensors")
    assert any(name.endswith("e_score_correction_bias") for name in tensors)
    ahead = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    tensors |= ahead | {"model.layers.2.eh_proj.weight": torch.zeros(144, 288)}
    (oracle.path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for shard, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, oracle.path / shard, {"format": "pt"})
    weight_map = {name: shard for shard, mine in shards.items() for name in mine}
    (oracle.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((oracle.path / "config.json").read_text())
    (oracle.path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return oracle


@pytest.mark.parametrize(("kvp", "tpa", "ep"), [(4, 1, 1), (2, 2, 2)])
def test_the_form_of_deepseek_r1_is_read_as_it_is_published(worlds, published, kvp, tpa, ep):
    """Experts of 23 columns: no kernel of panels holds their down-projections."""
    assert_equal(published, worlds(4).run(make_case(published, kvp, tpa, 7, "striped", ep=ep)))


@pytest.mark.parametrize("execution", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_packed_weights_in_every_execution(worlds, oracles, execution):
    oracle = oracles("deepseek_v3", "fp8-block")
    assert_equal(oracle, worlds(2).run(make_case(oracle, 2, 1, 16, "striped", execution=execution)))


@pytest.mark.parametrize("weight_dtype", ["fp8-block", "int4-g128", "nvfp4"])
@pytest.mark.parametrize(("family", "grid"), [("llama", (3, 1, 1)), ("qwen3_moe", (2, 1, 2))])
def test_weights_quantised_while_loading_are_the_same_in_every_layout(worlds, tmp_path, weight_dtype, family, grid):
    """Whole rows decide scales: a rank that has some inputs of a row rounds them as a rank with all of them does."""

    def numbers(weight_OI):
        return {".weight": weight_OI}, encoded(weight_OI, weight_dtype).numbers()

    oracle = make_packed_oracle(CONFIGS[family], Form({}, numbers, head=True), tmp_path)
    for kvp, tpa, ep in ((1, 1, 1), grid):
        case = make_case(oracle, kvp, tpa, 7, "striped", ep=ep, weight_dtype=weight_dtype)
        assert_equal(oracle, worlds(kvp * tpa).run(case))


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_heads_equal_their_numbers(worlds, tmp_path, tied, grid):
    kvp, tpa, pp = grid
    oracle = make_packed_oracle(CONFIGS["llama"], HEAD, tmp_path)
    settings = json.loads((oracle.path / "config.json").read_text())  # which may tie what the checkpoint does not
    (oracle.path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": tied}))
    case = make_case(oracle, kvp, tpa, 7, "striped", pp=pp)
    assert_equal(oracle, worlds(prod(grid)).run(case))
