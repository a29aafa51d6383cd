"""Prompts that show images give transformers' logits and greedy tokens, in float32, under every layout."""

import numpy as np
import pytest
from shown import NEW_TOKENS, VISION_LANGUAGE, make_shown_oracle
from test_equality import BLOCK_TOKENS, GROWTH_LIMIT_TOKENS, THRESHOLD_TOKENS, assert_equal

pytestmark = pytest.mark.dist

MADE = {}


@pytest.fixture
def oracle_of(tmp_path_factory):
    def oracle(family):
        if family not in MADE:
            MADE[family] = made = make_shown_oracle(VISION_LANGUAGE[family], tmp_path_factory.mktemp(family))
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
    oracle = oracle_of(family)
    assert_equal(oracle, worlds(1).run(make_case(oracle, chunk_tokens=chunk_tokens)))
