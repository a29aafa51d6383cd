"""Draft tokens on real ranks: whatever is accepted, logits and tokens are those of transformers."""

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from known_tokens import KnownTokens
from test_equality import PLACEMENTS, assert_equal, make_case
from test_kv_groups import CASES as WINDOWED_CASES
from test_kv_groups import GREEDY, engine, make_model

from longhelix import Layout
from longhelix.scheduler.drafting import Drafting
from oracle import FAMILIES, NATIVE_LATENTS, NATIVE_SIZES, WITH_EXPERTS, make_oracle
from tiers import few

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
    oracle, seed = oracles(model), CASES.index((model, layout, placement, chunk_tokens))
    depth = {} if layout[2] > 1 else {"depth": 1 + seed % 2}
    case = drafting(oracle, *layout, placement, chunk_tokens, seed, **depth)
    assert_drafted(oracle, worlds(prod(layout)).run(case))


@pytest.mark.parametrize("chunk_tokens", [7, 4096])
@pytest.mark.parametrize("model", ["latents", "native"])
def test_packed_pools_hold_drafts(worlds, oracles, model, chunk_tokens):
    oracle = oracles(model)
    case = drafting(oracle, 2, 1, 1, "striped", chunk_tokens, block_tokens=16)
    assert_drafted(oracle, worlds(2).run(case))


def test_drafts_attend_in_parts(worlds, oracles):
    """Over gloo, where exchanges travel while ranks attend (HOP-B)."""
    oracle = oracles("llama")
    more = {"hop_b": 3, "backend": "gloo", "execution": "eager"}
    case = drafting(oracle, 2, 1, 1, "striped", 4096, **more)
    assert_drafted(oracle, worlds(2).run(case | {"prompts": oracle.prompts}))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return make_model(tmp_path_factory.mktemp("windowed"), kinds)


@pytest.mark.parametrize(("layout", "settings"), few(WINDOWED_CASES, 2))
def test_an_engine_over_windows_has_the_tokens_of_transformers(windowed, layout, settings):
    """Two of four requests have drafts. The second time most prompts begin with a cached prefix."""
    with engine(windowed, layout, **settings) as llm:
        scheduler = llm._core._scheduler
        for is_cached in (False, True):
            first = 4 * is_cached
            prompts = [[]] * first + windowed.prompts
            tokens = [[]] * first + windowed.tokens
            drafter = KnownTokens(prompts, tokens, {first, first + 3}, seed=first)
            scheduler._drafting = Drafting(drafter, layout.pp)
            results = llm.generate(windowed.prompts, GREEDY)
            assert [result.token_ids for result in results] == windowed.tokens
            assert drafter.num_drafted > 0


def test_a_text_may_end_inside_a_draft(windowed):
    """By a stop string, a stop token, or its length, behind which the draft has more tokens."""
    prompt, tokens = windowed.prompts[1], windowed.tokens[1]
    with engine(windowed, Layout(kvp=2)) as llm:
        (whole,) = llm.generate([prompt], GREEDY)
        piece = llm.tokenizer.decode(tokens[:5])[-2:]
        asked = [
            {"stop": (piece,)},
            {"stop": (piece,), "max_new_tokens": 6},
            {"stop_token_ids": (tokens[6],)},
            {"max_new_tokens": 7},
            {"stop": (piece,), "stop_token_ids": (tokens[6],)},
        ]
        sampling = [replace(GREEDY, **each) for each in asked]
        expected = [llm.generate([prompt], each)[0] for each in sampling]
        for seed in range(3):
            ids = range(1 + len(asked) * (1 + seed), 1 + len(asked) * (2 + seed))
            texts = [[]] * ids.start + [prompt] * len(ids), [[]] * ids.start + [tokens] * len(ids)
            llm._core._scheduler._drafting = Drafting(KnownTokens(*texts, requests=ids, seed=seed), 1)
            for each, plain in zip(sampling, expected, strict=True):
                (result,) = llm.generate([prompt], each)
                assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
                assert result.finish_reason == plain.finish_reason
        assert len({len(plain.token_ids) for plain in expected}) > 1
        assert all(len(plain.token_ids) < len(whole.token_ids) for plain in expected)
        assert not llm._live
