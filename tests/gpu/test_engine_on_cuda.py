"""The engine on one CUDA device gives transformers' greedy tokens and log-probabilities, in every way to run layers."""

import numpy as np
import pytest
import torch

from longhelix import LLM, SamplingParams
from longhelix.compute.kernels import native
from oracle import (
    FAMILIES,
    NATIVE_LATENTS,
    NATIVE_SIZES,
    NEW_TOKENS,
    WITH_EXPERTS,
    make_oracle,
    save_tokenizer_files,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device that torch can use"),
]

TOLERANCE = 1e-3  # of log-probabilities, float32 both
# Head sizes that every format of keys and values takes.
NATIVE = {"native-llama": NATIVE_SIZES, "native-deepseek_v3": NATIVE_LATENTS}
EXECUTIONS = ("eager", "recorded", "compiled")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made = {}

    def oracle(family):
        if family not in made:
            made[family] = make_oracle((FAMILIES | WITH_EXPERTS | NATIVE)[family], tmp_path_factory.mktemp(family))
            save_tokenizer_files(made[family].path)
        return made[family]

    return oracle


def log_probabilities(logits_SV):
    shifted_SV = logits_SV - logits_SV.max(axis=-1, keepdims=True)
    return shifted_SV - np.log(np.exp(shifted_SV).sum(axis=-1, keepdims=True))


def assert_equals(oracle, results):
    """Up to a near tie of the reference's two best tokens, from where on both are right."""
    for prompt, tokens, logits_SV, result in zip(oracle.prompts, oracle.tokens, oracle.logits, results, strict=True):
        assert len(result.token_ids) == NEW_TOKENS
        expected_SV = log_probabilities(logits_SV.astype(np.float64))[len(prompt) - 1 :]
        for place, (token, wanted) in enumerate(zip(result.token_ids, tokens, strict=True)):
            assert abs(result.logprobs[place][token] - expected_SV[place][token]) <= TOLERANCE
            if token != wanted:
                best = np.sort(expected_SV[place])[-2:]
                assert best[1] - best[0] < 2 * TOLERANCE
                break


def mean_error(oracle, results):
    """How far the log-probabilities of the prompts' tokens are from the oracle's."""
    errors = []
    for prompt, logits_SV, result in zip(oracle.prompts, oracle.logits, results, strict=True):
        expected_SV = log_probabilities(logits_SV.astype(np.float64))
        for place, token in enumerate(prompt[1:]):
            errors.append(abs(result.prompt_logprobs[place + 1][token] - expected_SV[place][token]))
    return np.mean(errors)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_tokens_and_log_probabilities_equal_transformers(oracles, family, execution):
    """Chunks that cut every longer prompt, then one that holds all; requests beside each other, then one alone."""
    oracle = oracles(family)
    asked = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True)
    for chunk_tokens in (7, 4096):
        with LLM(str(oracle.path), device="cuda", execution=execution, chunk_tokens=chunk_tokens) as llm:
            assert llm.config.machines.device == "cuda"
            assert_equals(oracle, llm.generate(oracle.prompts, asked))
            (alone,) = llm.generate(oracle.prompts[-1:], asked)
            assert alone.token_ids == llm.generate(oracle.prompts, asked)[-1].token_ids


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "fp8", "int8"])
@pytest.mark.parametrize("family", ["native-llama", "native-deepseek_v3"])
def test_narrow_keys_and_values_cost_as_much_as_on_cpus(oracles, family, kv_dtype):
    """How far the prompts' log-probabilities are from those of float32 keys and values, on average: little more."""
    if kv_dtype in ("fp8", "int8") and (native.module is None or family == "native-deepseek_v3"):
        pytest.skip("the CPU kernels of this install do not hold latents in bytes")
    oracle, asked = oracles(family), SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)
    errors = []
    for device in ("cpu", "cuda"):
        with LLM(str(oracle.path), device=device, kv_dtype=kv_dtype, execution="eager") as llm:
            results = llm.generate(oracle.prompts, asked)
        errors.append(mean_error(oracle, results))
    on_cpu, on_cuda = errors
    assert on_cuda <= 1.3 * on_cpu


def test_sampling_takes_the_same_tokens_as_on_cpus(oracles):
    """Seeded draws from logits that differ in their last bits alone."""
    oracle, given = oracles("qwen3"), []
    asked = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, top_k=20, seed=7, ignore_eos=True)
    for device in ("cpu", "cuda"):
        with LLM(str(oracle.path), device=device) as llm:
            given.append([result.token_ids for result in llm.generate(oracle.prompts, asked)])
    assert given[0] == given[1]


def test_many_requests_share_a_small_pool(oracles):
    """Some are preempted, and swap or run again: their tokens stay those that each gives alone."""
    oracle = oracles("llama")
    asked = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [[(start + place) % 199 for place in range(20 + start % 17)] for start in range(24)]
    settings = {"device": "cuda", "chunk_tokens": 16, "prefix_cache": False}
    with LLM(str(oracle.path), kv_cache_tokens=256, **settings) as llm:
        results = llm.generate(prompts, asked)
    assert sum(result.preemptions for result in results) > 0
    with LLM(str(oracle.path), **settings) as llm:
        alone = [llm.generate([prompt], asked)[0].token_ids for prompt in prompts]
    assert [result.token_ids for result in results] == alone


def test_layers_in_bfloat16_are_as_near_as_on_cpus(oracles):
    """Prompts' log-probabilities beside those of float32, on average: norms, gates, rotations, attention."""
    oracle, errors = oracles("native-llama"), []
    asked = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)
    for device in ("cpu", "cuda"):
        with LLM(str(oracle.path), device=device, dtype="bfloat16", chunk_tokens=16) as llm:
            errors.append(mean_error(oracle, llm.generate(oracle.prompts, asked)))
    on_cpu, on_cuda = errors
    assert on_cuda <= 1.3 * on_cpu
