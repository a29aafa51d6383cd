"""GGUF files of each architecture, over several layouts, against transformers on the numbers of their blocks."""

import copy

import numpy as np
import pytest
import torch
from test_equality import assert_equal, make_case

from gguf_files import Q, make_gguf_oracle, split_gguf
from longhelix.compute.kernels import native, reference
from oracle import FAMILIES, WITH_EXPERTS, make_oracle
from tiers import few

pytestmark = pytest.mark.dist


def of_blocks(config):
    """The config with rows that are whole blocks of 256 numbers, or of 32 where heads are small."""
    found = copy.deepcopy(config)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank"), 256)
    sizes |= {"shared_expert_intermediate_size": 256, "q_lora_rank": 32, "qk_nope_head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if hasattr(config, "kv_lora_rank") else 2}
    for name, value in (sizes | heads).items():
        if getattr(found, name, None) is not None:
            setattr(found, name, value)
    return found


_QWEN2 = copy.deepcopy(FAMILIES["qwen2"])
_QWEN2.use_sliding_window, _QWEN2.layer_types = False, ["full_attention"] * 2  # GGUF files have no window
CONFIGS = {
    "llama": FAMILIES["llama"],
    "mistral": FAMILIES["mistral"],
    "mixtral": WITH_EXPERTS["mixtral"],
    "qwen2": _QWEN2,
    "qwen2_moe": WITH_EXPERTS["qwen2_moe"],
    "qwen3": FAMILIES["qwen3"],
    "qwen3_moe": WITH_EXPERTS["qwen3_moe"],
    "deepseek_v2": WITH_EXPERTS["deepseek_v2"],
    "deepseek_v3": WITH_EXPERTS["deepseek_v3"],
}
for _config in CONFIGS.values():  # files have one scale of rotations
    if "mscale" in _config.rope_parameters:
        _config.rope_parameters["mscale"] = _config.rope_parameters["mscale_all_dim"]
LAYOUTS = {
    "kvp2": {"kvp": 2, "tpa": 1},
    "tpa2": {"kvp": 1, "tpa": 2},
    "kvp2-tpa2": {"kvp": 2, "tpa": 2},
    "pp2": {"kvp": 1, "tpa": 1, "pp": 2},
}
EP = {"ep2": {"kvp": 2, "tpa": 1, "ep": 2}}


def layouts(family):
    return LAYOUTS | (EP if "moe" in family or "deepseek" in family or family == "mixtral" else {})


def run(worlds, oracle, model=None, **layout):
    world_size = layout["kvp"] * layout["tpa"] * layout.get("pp", 1)
    degrees = {name: degree for name, degree in layout.items() if name not in ("kvp", "tpa")}
    more = {"model": str(oracle.path if model is None else model), "dtype": "float32", **degrees}
    return worlds(world_size).run(make_case(oracle, layout["kvp"], layout["tpa"], 16, "striped", **more))


FORMS = [(family, True) for family in CONFIGS] + [("deepseek_v2", False), ("deepseek_v3", False)]
CASES = [(*form, layout) for form in FORMS for layout in layouts(form[0])]
# In CI shared experts, and latent attention in both forms.
QUICK = [("qwen2_moe", True, "ep2"), ("deepseek_v3", True, "tpa2"), ("deepseek_v3", False, "kvp2")]


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory):
    """Returns what transformers says about a file, which is written once."""
    made = {}

    def oracle(family, split_latents=True, kind=Q.F32):
        key = family, split_latents, kind
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            config = CONFIGS[family] if kind == Q.F32 else of_blocks(CONFIGS[family])
            saved = make_oracle(config, folder / "saved", prompt_lengths=(1,), new_tokens=1)
            made[key] = make_gguf_oracle(folder / "toy.gguf", saved.path, kind, split_latents=split_latents)
        return made[key]

    return oracle


@pytest.mark.parametrize(
    ("family", "split_latents", "layout"), few(QUICK + [case for case in CASES if case not in QUICK], len(QUICK))
)
def test_each_architecture_equals_transformers(worlds, ggufs, family, split_latents, layout):
    oracle = ggufs(family, split_latents)
    assert_equal(oracle, run(worlds, oracle, **layouts(family)[layout]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.BF16, Q.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", CONFIGS)
def test_quantised_files_equal_transformers_on_their_numbers(worlds, ggufs, family, kind):
    oracle = ggufs(family, kind=kind)
    for layout in layouts(family).values():
        assert_equal(oracle, run(worlds, oracle, **layout))


def mixed(name):
    """As llama.cpp mixes K-quants: weights that lie together in memory differ."""
    return Q.Q6_K if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else Q.Q4_K


@pytest.mark.parametrize("family", few(["llama", "qwen3_moe", "deepseek_v3"]))
def test_files_that_mix_k_quants_equal_transformers_on_their_numbers(worlds, tmp_path, family):
    saved = make_oracle(of_blocks(CONFIGS[family]), tmp_path / "saved", prompt_lengths=(1,), new_tokens=1)
    oracle = make_gguf_oracle(tmp_path / "toy.gguf", saved.path, mixed)
    for layout in layouts(family).values():
        assert_equal(oracle, run(worlds, oracle, **layout))


def numbers_beside_blocks(name):
    """F16 alone, beside Q8_0 in one product, and in a tied head. Experts of a layer have one type."""
    if any(part in name for part in ("attn_k", "attn_v", "exps")):
        return Q.Q8_0
    return Q.Q4_K if "ffn_down" in name else Q.F16


@pytest.mark.parametrize("family", few(["llama", "qwen2", "qwen3_moe", "deepseek_v3"]))
def test_files_with_numbers_beside_blocks_equal_transformers_on_their_numbers(worlds, tmp_path, family):
    saved = make_oracle(of_blocks(CONFIGS[family]), tmp_path / "saved", prompt_lengths=(1,), new_tokens=1)
    oracle = make_gguf_oracle(tmp_path / "toy.gguf", saved.path, numbers_beside_blocks)
    for layout in layouts(family).values():
        assert_equal(oracle, run(worlds, oracle, **layout))


def _round_inputs(model):
    """Let products see their inputs as bytes, with a scale for each 64 of a row, if their weights are whole blocks."""

    def rounded(_module, inputs):
        q_TX, scales_TX = reference.quantise_rows(inputs[0].flatten(0, -2))
        steps_TX = scales_TX.repeat_interleave(64, dim=1)[:, : q_TX.shape[1]]
        return (q_TX * steps_TX).view_as(inputs[0])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % 256 == 0:
            module.register_forward_pre_hook(rounded)


def _error(found, wanted):
    return np.median(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1))


@pytest.mark.skipif(native.module is None, reason="this install has no native kernels, which multiply bytes")
def test_products_of_packed_weights_may_round_their_inputs(worlds, tmp_path):
    """The logits are those of inputs that are rounded in the same way, in every layout."""
    saved = make_oracle(of_blocks(CONFIGS["llama"]), tmp_path / "saved", prompt_lengths=(1,), new_tokens=1)
    exact = make_gguf_oracle(tmp_path / "exact.gguf", saved.path, mixed)
    oracle = make_gguf_oracle(tmp_path / "toy.gguf", saved.path, mixed, prepare=_round_inputs)
    prompt = len(oracle.prompts[3])
    wanted = oracle.logits[3][:prompt]
    for layout in LAYOUTS.values():
        (found,) = (
            rank["logits_3"][:prompt]
            for rank in run(worlds, oracle, **layout, activation_dtype="int8")
            if "logits_3" in rank
        )
        # Sums in another order round a few inputs to other bytes.
        assert _error(found, wanted) < 0.01 * _error(exact.logits[3][:prompt], wanted)


@pytest.mark.slow
@pytest.mark.skipif(native.module is None, reason="this install has no native kernels, which multiply bytes")
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q5_1, Q.Q8_0, Q.Q3_K, Q.Q4_K, Q.Q6_K, Q.IQ4_XS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latents_may_round_their_inputs(worlds, ggufs, family, kind):
    oracle = ggufs(family, kind=kind)
    prompt = len(oracle.prompts[3])
    for layout in layouts(family).values():
        (found,) = (
            rank["logits_3"][:prompt]
            for rank in run(worlds, oracle, **layout, activation_dtype="int8")
            if "logits_3" in rank
        )
        assert 0 < _error(found, oracle.logits[3][:prompt]) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 2])
def test_a_split_model_is_opened_by_any_of_its_parts(worlds, ggufs, part):
    oracle = ggufs("qwen3_moe")
    parts = split_gguf(oracle.path, 3)
    assert_equal(oracle, run(worlds, oracle, parts[part], kvp=2, tpa=1))
