"""Pipeline stages give what one stage gives: 3D layouts of models of five layers, which no number of stages divides."""

import copy
import itertools

import numpy as np
import pytest
from oracle import FAMILIES, WITH_EXPERTS, make_oracle
from test_equality import assert_equal, make_case

pytestmark = pytest.mark.dist

LAYERS = 5
# PP, KVP, TPA
LAYOUTS = [
    (pp, kvp, tpa)
    for pp, (kvp, tpa) in itertools.product((2, 3, 4, 5), ((1, 1), (2, 1), (1, 2), (3, 1)))
    if pp * kvp * tpa <= 6
]
CHUNKS = (1, 16, 4096)
PLACEMENTS = ("striped", "growing", "local", "auto")
MODELS = {"llama": FAMILIES["llama"]} | {name: WITH_EXPERTS[name] for name in ("qwen3_moe", "deepseek_v3")}
CASES = [
    (model, layout, CHUNKS[number % 3], PLACEMENTS[number % 4])
    for number, (model, layout) in enumerate(itertools.product(MODELS, LAYOUTS))
]


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    made = {}

    def oracle(model):
        if model not in made:
            config = copy.deepcopy(MODELS[model])
            config.num_hidden_layers = LAYERS
            if hasattr(config, "layer_types"):
                config.layer_types = ["full_attention"] * LAYERS
            made[model] = make_oracle(config, tmp_path_factory.mktemp(f"deep-{model}"))
        return made[model]

    return oracle


def run(worlds, oracle, pp, kvp, tpa, chunk_tokens, placement, **more):
    case = make_case(oracle, kvp, tpa, chunk_tokens, placement, pp=pp, **more)
    return worlds(pp * kvp * tpa).run(case)


def show(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("model", "layout", "chunk_tokens", "placement"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if np.prod(case[1]) > 4 and case[0] != "llama" else case
        for case in CASES
    ],
    ids=show,
)
def test_logits_and_tokens_equal_transformers(worlds, deep, model, layout, chunk_tokens, placement):
    assert_equal(deep(model), run(worlds, deep(model), *layout, chunk_tokens, placement))


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_tokens", "placement"), list(itertools.product(CHUNKS, PLACEMENTS)))
@pytest.mark.parametrize("layout", LAYOUTS, ids=show)
@pytest.mark.parametrize("model", MODELS)
def test_all_chunks_and_placements(worlds, deep, model, layout, chunk_tokens, placement):
    assert_equal(deep(model), run(worlds, deep(model), *layout, chunk_tokens, placement))


@pytest.mark.parametrize("stage_layers", [(1, 4), (4, 1)], ids=show)
def test_stages_of_other_sizes(worlds, deep, stage_layers):
    assert_equal(deep("llama"), run(worlds, deep("llama"), 2, 2, 1, 16, "striped", stage_layers=stage_layers))


@pytest.mark.parametrize("pp", [2, 3])
def test_the_tied_layout_has_stages(worlds, deep, pp):
    assert_equal(deep("llama"), run(worlds, deep("llama"), pp, 2, 1, 7, "striped", tied=True))


@pytest.mark.parametrize("chunk_tokens", [1, 16, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_equal_steps_have_equal_bits(worlds, deep, model, chunk_tokens):
    """One request: the same steps, whatever the number of stages."""
    oracle = deep(model)
    found = {}
    for pp in (1, 2, 4):
        case = make_case(oracle, 1, 1, chunk_tokens, "striped", pp=pp) | {"prompts": oracle.prompts[-1:]}
        ranks = worlds(pp).run(case)
        found[pp] = ranks[-1]["logits_0"]
        assert all(rank["rows"].tolist() == ranks[0]["rows"].tolist() for rank in ranks)
    assert found[1].tobytes() == found[2].tobytes() == found[4].tobytes()


def test_hop_b_in_each_stage(worlds, deep):
    """Over gloo, where exchanges travel while ranks attend."""
    oracle = deep("llama")
    ranks = run(worlds, oracle, 2, 2, 1, 64, "striped", hop_b=3, backend="gloo", execution="eager")
    assert max(int(rank["parts"]) for rank in ranks) > 1
    assert_equal(oracle, ranks)


def test_stages_keep_only_what_is_theirs(worlds, deep):
    """Rows of experts are counted by layer: each stage has those of its own layers."""
    oracle = deep("qwen3_moe")
    ranks = run(worlds, oracle, 3, 1, 2, 16, "striped")
    assert [len(rank["expert_rows"]) for rank in ranks] == [2, 2, 2, 2, 1, 1]
    assert_equal(oracle, ranks)

