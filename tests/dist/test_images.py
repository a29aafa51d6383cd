"""Prompts that show images give transformers' logits and greedy tokens, in float32, under every layout."""

import numpy as np
import pytest
from shown import NEW_TOKENS, PACKED, VISION_LANGUAGE, make_shown_oracle
from test_equality import BLOCK_TOKENS, GROWTH_LIMIT_TOKENS, THRESHOLD_TOKENS, assert_equal
from test_llm import needs_compiler

from longhelix.compute.kernels import native
from tiers import few

pytestmark = pytest.mark.dist

MADE = {}


@pytest.fixture
def oracle_of(tmp_path_factory):
    def oracle(family):
        if family not in MADE:
            config = (VISION_LANGUAGE | {"packed": PACKED})[family]
            MADE[family] = made = make_shown_oracle(config, tmp_path_factory.mktemp(family))
            np.savez(made.path / "states.npz", **{digest.hex(): states for digest, states in made.states.items()})
        return MADE[family]

    return oracle


def make_case(oracle, kvp=1, tpa=1, chunk_tokens=4096, placement="striped", **more):
    return {
        "model": str(oracle.path),
        "kvp": kvp,
        "tpa": tpa,
        "chunk_tokens": chunk_tokens,
        "placement": placement,
        "block_tokens": BLOCK_TOKENS,
        "growth_limit_tokens": GROWTH_LIMIT_TOKENS,
        "kvp_threshold_tokens": THRESHOLD_TOKENS,
        "prompts": oracle.prompts,
        "images": [[(one.start, one.rows, one.columns, one.digest.hex()) for one in spans] for spans in oracle.spans],
        "states": str(oracle.path / "states.npz"),
        "max_new_tokens": NEW_TOKENS,
    } | more


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 4096])
def test_one_rank(worlds, oracle_of, family, chunk_tokens):
    """Chunks that cut images, and some of one row of an image."""
    oracle = oracle_of(family)
    assert_equal(oracle, worlds(1).run(make_case(oracle, chunk_tokens=chunk_tokens)))


LAYOUTS = [(kvp, ranks // kvp) for ranks in (2, 3, 4) for kvp in range(1, ranks + 1) if ranks % kvp == 0]
CHUNKS, PLACEMENTS = (5, 1, 16, 4096), ("growing", "striped", "auto", "local")


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize(("kvp", "tpa"), few(LAYOUTS, 4))
def test_ranks_share_heads_and_kv(worlds, oracle_of, family, kvp, tpa):
    """Chunk sizes, placements and, with experts, TPF x EP in turn."""
    oracle, index = oracle_of(family), LAYOUTS.index((kvp, tpa))
    ep = [2, 1, 3, 1, 2, 4, 2][index] if family == "qwen3_vl_moe" else 1
    chunk_tokens, placement = CHUNKS[index % 4], PLACEMENTS[(index + (family == "qwen3_vl")) % 4]
    ranks = worlds(kvp * tpa).run(make_case(oracle, kvp, tpa, chunk_tokens, placement, ep=ep))
    assert_equal(oracle, ranks)


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize(("kvp", "tpa", "pp"), few([(2, 1, 2), (1, 1, 3), (1, 1, 2), (1, 2, 2)], 2))
def test_the_tower_adds_to_layers_of_later_stages(worlds, oracle_of, family, kvp, tpa, pp):
    """Of three layers two get rows: with stages of one and two layers, or three of one, so that the second one gets
    some, and the third none."""
    oracle = oracle_of(family)
    stage_layers = [1, 2] if pp == 2 else [1, 1, 1]
    case = make_case(oracle, kvp, tpa, 7, "striped", pp=pp, stage_layers=stage_layers)
    assert_equal(oracle, worlds(kvp * tpa * pp).run(case))


@pytest.mark.parametrize("placement", few(["growing", "striped", "local"]))
def test_tied_instances(worlds, oracle_of, placement):
    oracle = oracle_of("qwen3_vl")
    assert_equal(oracle, worlds(4).run(make_case(oracle, 2, 2, 7, placement, tied=True)))


@pytest.mark.parametrize("execution", ["eager", pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler])])
def test_other_executions(worlds, oracle_of, execution):
    """Steps with rows of images run op by op beside those that are compiled."""
    oracle = oracle_of("qwen3_vl")
    ranks = worlds(2).run(make_case(oracle, 2, 1, 7, "striped", execution=execution))
    assert_equal(oracle, ranks)


@pytest.mark.skipif(native.module is None, reason="tapes are of the native kernels, which were not built here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_tapes(worlds, oracle_of, ranks):
    """Steps of single rows are on tapes, but for those that have an image's row."""
    oracle = oracle_of("packed")
    found = worlds(ranks).run(make_case(oracle, ranks, chunk_tokens=1, block_tokens=16))
    assert_equal(oracle, found)
    assert all(rank["tapes"] for rank in found)


def test_graphs(worlds, oracle_of):
    oracle = oracle_of("qwen3_vl")
    ranks = worlds(2).run(make_case(oracle, 2, 1, 7, "striped", graphed=True))
    assert_equal(oracle, ranks)
    assert all(len(rank["graphs"]) for rank in ranks)


def test_a_preempted_request_shows_its_images_again(worlds, oracle_of):
    """In a pool that holds no two of the longer prompts with their answers."""
    oracle = oracle_of("qwen3_vl")
    ranks = worlds(2).run(make_case(oracle, 2, 1, 16, "striped", pool_blocks=10))
    assert sum(int(ranks[0][f"preemptions_{index}"]) for index in range(len(oracle.prompts)))
    with_images = [index for index, spans in enumerate(oracle.spans) if spans]
    assert any(ranks[0][f"preemptions_{index}"] for index in with_images)
    for index, tokens in enumerate(oracle.tokens):
        assert ranks[0][f"tokens_{index}"].tolist() == tokens


@pytest.mark.parametrize("family", VISION_LANGUAGE)
@pytest.mark.parametrize(
    ("kvp", "tpa", "pp", "placement"), few([(2, 2, 1, "local"), (3, 1, 1, "striped"), (1, 2, 2, "auto")])
)
def test_token_shards_get_their_own_rows_of_images(worlds, oracle_of, family, kvp, tpa, pp, placement):
    oracle, flash = oracle_of(family), {"flash_comm_v1": True, "sp_min_token_num": 3}
    case = make_case(oracle, kvp, tpa, 7, placement, pp=pp, **flash)
    assert_equal(oracle, worlds(kvp * tpa * pp).run(case))
