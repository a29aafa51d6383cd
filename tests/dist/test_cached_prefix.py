"""A request that begins with the KV blocks of another one, as they are or moved to other ranks, gives transformers'
logits and greedy tokens."""

import os
import shutil

import pytest
from test_equality import TOLERANCE, deviation, first_difference, is_near_tie, make_case

from longhelix.compute.kernels import native
from longhelix.spec.layout import HeadShape, Layout
from oracle import FAMILIES, NATIVE_LATENTS, NATIVE_SIZES, NEW_TOKENS, WITH_EXPERTS, make_oracle

pytestmark = pytest.mark.dist

# In rows, and packed where the kernels are; keys and values of three KV heads, or latents.
MODELS = {
    "gqa-rows": FAMILIES["llama"],
    "mla-rows": WITH_EXPERTS["deepseek_v3"],
    "gqa-packed": NATIVE_SIZES,
    "mla-packed": NATIVE_LATENTS,
}
GRIDS = [(2, 1), (3, 1), (2, 2)]  # KVP, TPA; over TPA 2 the three KV heads are two and one


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made = {}

    def oracle(model):
        if model not in made:
            made[model] = make_oracle(MODELS[model], tmp_path_factory.mktemp(model))
        return made[model]

    return oracle


def block_tokens_of(model):
    return 16 if "packed" in model else 4


def cached_tokens_of(model, whole):
    """Of 41: some blocks, and not all of the next one."""
    block_tokens = block_tokens_of(model)
    return 32 if whole else 32 + block_tokens // 2


def run(worlds, oracle, model, kvp, tpa, *, whole, moved, first_tokens=41, placement="striped", **more):
    """Request 0 is the first of the longest prompt's tokens, request 1 all of them: it begins with KV of the other."""
    prompt = oracle.prompts[3]
    more |= {"prompts": [prompt[:first_tokens], prompt], "block_tokens": block_tokens_of(model), "moved": moved}
    more |= {"cached_tokens": cached_tokens_of(model, whole), "growth_limit_tokens": 16}
    return worlds(kvp * tpa).run(make_case(oracle, kvp, tpa, 16, placement, **more))


def assert_continues(oracle, ranks, cached_tokens, first_tokens=41):
    """Both requests: what the first gives does not change because another begins with its blocks."""
    reference, tokens, prompt_tokens = oracle.logits[3], oracle.tokens[3], len(oracle.prompts[3])
    assert deviation(ranks[0]["logits_0"][:first_tokens], reference[:first_tokens]) <= TOLERANCE
    for request, skipped in ((0, 0), (1, cached_tokens)):
        if request == 0 and first_tokens < prompt_tokens:
            continue
        found = ranks[0][f"tokens_{request}"].tolist()
        assert all(rank[f"tokens_{request}"].tolist() == found for rank in ranks)
        differs = first_difference(found, tokens)
        assert differs is None or is_near_tie(reference[prompt_tokens - 1 + differs])
        stop = len(reference) if differs is None else prompt_tokens + differs
        logits = ranks[0][f"logits_{request}"]
        assert len(logits) == prompt_tokens + NEW_TOKENS - 1 - skipped
        assert deviation(logits[: stop - skipped], reference[skipped:stop]) <= TOLERANCE
    assert sum(ranks[0]["held_1"].tolist()) == prompt_tokens + NEW_TOKENS - 1
    assert all(int(rank["sequences_left"]) == 0 for rank in ranks)


def layer_block_bytes(model, layout, rank):
    """Of one KV block in float32."""
    config = MODELS[model]
    if "mla" in model:
        return block_tokens_of(model) * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    heads = HeadShape(config.num_attention_heads, config.num_key_value_heads)
    return block_tokens_of(model) * len(layout.kv_heads(heads, rank)) * 2 * config.head_dim * 4


def assert_moved(model, kvp, tpa, ranks):
    """Bytes handed to the transport: those of blocks that go to another rank, in all layers, and nothing else."""
    layout, moves = Layout(kvp=kvp, tpa=tpa), ranks[0]["moves"].tolist()
    assert any(source == target for source, target in moves)
    layers = MODELS[model].num_hidden_layers
    for rank, found in enumerate(ranks):
        left = sum(source == layout.kvp_rank(rank) != target for source, target in moves)
        assert int(found["copied_bytes"]) == left * layers * layer_block_bytes(model, layout, rank)
    assert any(int(found["copied_bytes"]) for found in ranks)


@pytest.mark.parametrize(("kvp", "tpa"), GRIDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_a_request_goes_on_from_another_ones_blocks(worlds, oracles, model, kvp, tpa, whole):
    """Whole blocks are shared, one that is not full is copied on its rank."""
    ranks = run(worlds, oracles(model), model, kvp, tpa, whole=whole, moved=False)
    assert_continues(oracles(model), ranks, cached_tokens_of(model, whole))
    assert [int(rank["copied_bytes"]) for rank in ranks] == [0] * len(ranks)
    if "packed" in model and native.module is not None:
        assert all(rank["packed_pool"] for rank in ranks)


@pytest.mark.parametrize(("kvp", "tpa"), GRIDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_a_request_goes_on_from_blocks_that_were_moved(worlds, oracles, model, kvp, tpa, whole):
    ranks = run(worlds, oracles(model), model, kvp, tpa, whole=whole, moved=True)
    assert_continues(oracles(model), ranks, cached_tokens_of(model, whole))
    assert_moved(model, kvp, tpa, ranks)


@pytest.mark.parametrize(("placement", "kvp", "first_tokens"), [("growing", 3, 41), ("local", 3, 41), ("auto", 2, 36)])
@pytest.mark.parametrize("moved", [False, True], ids=["left", "moved"])
def test_a_request_goes_on_by_its_own_placement(worlds, oracles, placement, kvp, first_tokens, moved):
    """Ranks that keep KV of it and write none, ranks that are added; with auto the first request is growing, on one
    rank so far, and the other one striped."""
    model, oracle = "gqa-rows", oracles("gqa-rows")
    settings = {"first_tokens": first_tokens, "placement": placement}
    ranks = run(worlds, oracle, model, kvp, 1, whole=False, moved=moved, **settings)
    assert_continues(oracle, ranks, cached_tokens_of(model, whole=False), first_tokens)
    if moved:
        assert_moved(model, kvp, 1, ranks)


@pytest.mark.parametrize(
    ("execution", "graphed", "backend"),
    [
        ("recorded", False, None),
        ("recorded", False, "gloo"),
        ("eager", False, None),
        ("eager", True, "gloo"),
        pytest.param(
            "compiled",
            False,
            None,
            marks=[
                pytest.mark.slow,  # the compiler takes most of it
                pytest.mark.skipif(
                    shutil.which(os.environ.get("CXX", "g++")) is None,
                    reason="torch.compile needs a C++ compiler, and here is none",
                ),
            ],
        ),
    ],
)
def test_copies_come_between_steps_of_any_execution(worlds, oracles, execution, graphed, backend):
    """Before a decode step that is replayed; by either transport, over gloo in parts as well."""
    model, more = "gqa-packed", {"execution": execution, "graphed": graphed, "backend": backend}
    more |= {"hop_b": 2} if backend == "gloo" else {}
    ranks = run(worlds, oracles(model), model, 2, 1, whole=False, moved=True, **more)
    assert_continues(oracles(model), ranks, cached_tokens_of(model, whole=False))
    assert_moved(model, 2, 1, ranks)
    if execution == "recorded" and backend is None and native.module is not None:
        assert all(rank["tapes"] for rank in ranks)
