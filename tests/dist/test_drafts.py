"""Draft tokens on real ranks: whatever is accepted, logits and tokens are those of transformers."""

import itertools

import numpy as np
import pytest
from test_equality import PLACEMENTS, assert_equal, make_case

from oracle import FAMILIES, NATIVE_LATENTS, NATIVE_SIZES, WITH_EXPERTS, make_oracle

pytestmark = pytest.mark.dist

MODELS = {"llama": FAMILIES["llama"], "deepseek_v3": WITH_EXPERTS["deepseek_v3"]}
# KVP, TPA and stages.
LAYOUTS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2), (3, 2, 1)]
CASES = list(itertools.product(MODELS, LAYOUTS, (*PLACEMENTS, "auto"), (7, 4096)))
# In CI every layout, placement and model, and some of their pairs.
IN_CI = set(range(0, len(CASES), 9))


@pytest.fixture(scope="session")
def oracles(tmp_path_factory):
    made = {}

    def oracle(model):
        if model not in made:
            configs = MODELS | {"latents": NATIVE_LATENTS, "native": NATIVE_SIZES}
            made[model] = make_oracle(configs[model], tmp_path_factory.mktemp(model))
        return made[model]

    return oracle


def drafting(oracle, kvp, tpa, pp, placement, chunk_tokens, seed=0, **more):
    """All requests but the first have drafts, of any number of right tokens and wrong ones."""
    requests = list(range(1, len(oracle.prompts)))
    drafts = {"continuations": [list(tokens) for tokens in oracle.tokens], "requests": requests, "seed": seed}
    return make_case(oracle, kvp, tpa, chunk_tokens, placement, pp=pp, drafts=drafts, **more)


def assert_drafted(oracle, ranks):
    assert_equal(oracle, ranks)
    for rank in ranks:
        assert rank["lengths"].tolist() == ranks[0]["lengths"].tolist()
        assert rank["num_drafted"] == ranks[0]["num_drafted"] > 0
        assert rank["sequences_left"] == 0
    # Most steps have fewer rows than tokens come of them: drafts are accepted, and rejected.
    rows, new = np.sum(ranks[0]["rows"]), sum(map(len, oracle.prompts)) + sum(map(len, oracle.tokens))
    assert rows > new - len(oracle.prompts)


@pytest.mark.parametrize(
    ("model", "layout", "placement", "chunk_tokens"),
    [case if number in IN_CI else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_logits_and_tokens_equal_transformers(worlds, oracles, model, layout, placement, chunk_tokens):
    oracle, (kvp, tpa, pp) = oracles(model), layout
    for depth in (2,) if pp == 1 else (pp + 1,):
        case = drafting(
            oracle,
            kvp,
            tpa,
            pp,
            placement,
            chunk_tokens,
            CASES.index((model, layout, placement, chunk_tokens)),
            depth=depth,
        )
        assert_drafted(oracle, worlds(kvp * tpa * pp).run(case))
