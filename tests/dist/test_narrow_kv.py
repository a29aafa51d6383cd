"""KV in nvfp4 and int4 works with every layout, cached prefixes, preemption, swapped KV and batch-invariant mode."""

import pytest
from test_contexts import MODELS, engine

from longhelix import Layout, SamplingParams, ServiceLevel
from longhelix.compute.kernels import native
from oracle import make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels"),
]

SAMPLING = SamplingParams(max_new_tokens=24, logprobs=3)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Oracles with heads of 16 channels, by the name of a model."""

    def oracle(model):
        made = make_oracle(MODELS[model], tmp_path_factory.mktemp(model))
        save_tokenizer_files(made.path)
        return made

    return {model: oracle(model) for model in ("gqa-packed", "mla-packed")}


def generated(results):
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.parametrize(
    ("kv_dtype", "family", "layout"),
    few(
        [
            ("nvfp4", "gqa-packed", Layout(kvp=2)),
            ("nvfp4", "mla-packed", Layout()),
            ("int4", "gqa-packed", Layout(kvp=2)),
        ],
        3,
    ),
)
def test_a_cached_prefix_changes_no_bit(oracles, tmp_path, kv_dtype, family, layout):
    """KV blocks come back as they were. Chunks are as long as blocks, so all steps have the same numbers."""
    oracle = oracles[family]
    prompt, other = oracle.prompts[3], [*oracle.prompts[3][:35], 1, 2, 3]
    with engine(oracle, tmp_path, layout, kv_dtype=kv_dtype) as llm:
        llm.generate([prompt], SAMPLING)
        cached = llm.generate([other], SAMPLING)
        fresh = llm.generate([other], SAMPLING, ServiceLevel(cache_salt="fresh"))
    assert [result.cached_tokens for result in (*cached, *fresh)] == [32, 0]
    assert generated(cached) == generated(fresh)


@pytest.mark.parametrize(
    ("kv_dtype", "swap_tokens"), few([("nvfp4", 0), ("nvfp4", 512), ("int4", 512), ("int4", 0)], 3)
)
def test_preempted_and_batched_requests_have_the_same_bits(oracles, tmp_path, kv_dtype, swap_tokens):
    """In batch-invariant mode, so that what is computed again or beside other requests has the same numbers."""
    oracle, settings = oracles["gqa-packed"], {"kv_dtype": kv_dtype, "batch_invariant": True}
    with engine(oracle, tmp_path, Layout(kvp=2), **settings) as llm:
        alone = [llm.generate([prompt], SAMPLING)[0] for prompt in oracle.prompts]
    settings |= {"kv_cache_tokens": 80, "swap_tokens": swap_tokens}
    with engine(oracle, tmp_path, Layout(kvp=2), **settings) as llm:
        llm._core._scheduler._swap_s = 0.0  # otherwise the model is too small to swap
        results = llm.generate(oracle.prompts * 2, SAMPLING)
    assert generated(results) == generated(alone * 2)
    assert sum(result.preemptions for result in results) > 0
    assert (sum(result.swapped_tokens for result in results) > 0) == (swap_tokens > 0)
