"""Random traffic over real ranks with too small a pool: preemption, the prefix cache, deadlines, adaptive chunks and
early ends together leave each request the tokens that it has alone, on one rank."""

import random
from functools import cache

import pytest

from longhelix import LLM, Layout, SamplingParams, ServiceLevel
from oracle import FAMILIES, VOCAB, WITH_EXPERTS, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = pytest.mark.dist

BLOCK_TOKENS, MOST_TOKENS = 4, 96
DOCUMENT = [(7 * index + index // 9) % VOCAB for index in range(60)]
NEAR = 2e-3  # natural log, between the two best: what rounding may turn


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def path(request, tmp_path_factory):
    config = FAMILIES["llama"] if request.param == "llama" else WITH_EXPERTS["deepseek_v3"]
    made = make_oracle(config, tmp_path_factory.mktemp(request.param))
    save_tokenizer_files(made.path)
    return str(made.path)


@pytest.fixture(scope="module")
def alone(path):
    """A prompt's tokens on one rank with nothing beside it, and which of them were near ties."""
    with LLM(path, dtype="float32", block_tokens=BLOCK_TOKENS, chunk_tokens=512, prefix_cache=False) as llm:

        @cache
        def run(prompt, new_tokens):
            params = SamplingParams(max_new_tokens=new_tokens, logprobs=2, ignore_eos=True)
            (result,) = llm.generate([list(prompt)], params)
            best = [sorted(found.values(), reverse=True)[:2] for found in result.logprobs]
            return result.token_ids, [first - second < NEAR for first, second in best]

        yield run


def assert_same(found, expected):
    token_ids, near = expected
    for index, (own, other) in enumerate(zip(found, token_ids, strict=False)):
        if own != other:
            assert near[index], (found, token_ids)
            return


CASES = [
    (Layout(kvp=3), "growing", "srpt", 0),
    (Layout(kvp=2, ffn_replicas=2), "auto", "lars", 0),
    (Layout(), "striped", "fcfs", 0),
    (Layout(kvp=2), "striped", "lars", 0),
    (Layout(kvp=2), "local", "edf", 0),
    (Layout(kvp=2), "auto", "lars", 0),
    (Layout(kvp=2), "striped", "fcfs", 256),
    (Layout(pp=2), "striped", "lars", 0),
    (Layout(kvp=2, pp=2), "growing", "srpt", 0),
    (Layout(kvp=3, ffn_replicas=3), "growing", "srpt", 224),
    (Layout(kvp=2, tpa=2, ffn_replicas=2), "local", "edf", 0),
    (Layout(tpa=2, pp=2), "striped", "edf", 224),
    (Layout(kvp=2, pp=2, ffn_replicas=2), "auto", "lars", 0),
]


@pytest.mark.parametrize(
    ("layout", "placement", "policy", "swap_tokens"),
    few(CASES),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_each_request_has_its_own_tokens(path, alone, layout, placement, policy, swap_tokens):
    chance = random.Random(f"{placement} {policy} {layout.kvp}")
    more = {"kvp_threshold_tokens": 40} if placement == "auto" else {"growth_limit_tokens": 16}
    settings = more | {
        "placement": placement,
        "policy": policy,
        "dtype": "float32",
        "block_tokens": BLOCK_TOKENS,
        "max_model_len": MOST_TOKENS,
        "kv_cache_tokens": layout.kvp * (72 if placement in ("striped", "growing") and layout.kvp > 1 else 112),
        "tbt_target_s": 0.004,
        "swap_tokens": swap_tokens,
        "max_running": 8,
    }
    with LLM(path, layout, **settings) as llm:
        asked, results = {}, {}
        while len(asked) < 16 or llm.has_work:
            if len(asked) < 16 and chance.random() < 0.4:
                shared = DOCUMENT[: chance.choice([0, 5, 16, 24, 40])]
                prompt = [*shared, *(chance.randrange(VOCAB) for _ in range(chance.randint(1, 8)))]
                new_tokens = chance.randint(1, MOST_TOKENS - len(prompt) - 10)
                deadline_s, priority = chance.choice([None, 0.01, 5.0]), chance.choice([0, 0, 1])
                service = ServiceLevel(ttft_slo_s=deadline_s, client=chance.choice("ab"), priority=priority)
                params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
                asked[llm.add(prompt, params, service)] = (tuple(prompt), new_tokens)
            if asked and chance.random() < 0.01:
                id = chance.choice(list(asked))
                ended = llm.abort(id)
                results |= {} if ended is None else {id: ended}
            results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
    assert results.keys() == asked.keys()
    for id, result in results.items():
        expected = alone(*asked[id])
        assert result.finish_reason == "abort" or len(result.token_ids) == asked[id][1]
        assert_same(result.token_ids, expected)
    assert sum(result.cached_tokens for result in results.values()) > 0
    assert sum(result.preemptions for result in results.values()) > 0
    assert (sum(result.swapped_tokens for result in results.values()) > 0) == (swap_tokens > 0)
