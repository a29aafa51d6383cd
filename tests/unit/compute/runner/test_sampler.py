import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longhelix.compute.kernels.candidates import Weighing, candidates, penalise
from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.runner import choice, sampler
from longhelix.compute.runner.sampler import logprobs, uniform
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.errors import UserError
from longhelix.scheduler.request import SamplingParams
from tiers import few

pytestmark = pytest.mark.unit

VOCAB = 40


def random_logits(seed: int, size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def seen_tokens(token_ids, size: int) -> SeenTokens:
    seen = SeenTokens(range(size))
    seen.add(np.array(token_ids))
    return seen


def penalised(logits_V: torch.Tensor, penalty: float, token_ids) -> torch.Tensor:
    seen = seen_tokens(token_ids, len(logits_V)) if penalty != 1 else None
    logits_1V = logits_V[None].clone()
    penalise(logits_1V, Weighing([seen and seen.words_W], torch.tensor([penalty]), torch.ones(1)))
    return logits_1V[0]


def sample(logits_V: torch.Tensor, params: SamplingParams, seed: int, token_ids) -> int:
    """The next token after `token_ids`, of the whole row; what is faster says the same or nothing."""
    key = seed, len(token_ids)
    logits_V = penalised(logits_V, params.repetition_penalty, token_ids)
    token_id = sampler.sample(logits_V, params, *key)
    for found in (sampler.sample_rows(logits_V[None], [params], [key]), choose(logits_V[None], [params], [key])):
        assert found in ([token_id], [UNDECIDED])
    return token_id


def choose(logits_SV: torch.Tensor, params, keys, count: int = 8) -> list[int]:
    temperatures_S = torch.tensor([each.temperature for each in params], dtype=torch.float32)
    ones_S, rows = torch.ones(len(params)), len(params)
    found = candidates(logits_SV, Weighing([None] * rows, ones_S, temperatures_S), count)
    shard = choice.VocabularyShard(*(tensor.numpy() for tensor in found))
    return choice.choose(shard, logits_SV.shape[1], params, keys).tolist()


def oracle(logits_V: torch.Tensor, params: SamplingParams, token_ids) -> torch.Tensor:
    """transformers' processors, in the order in which its generate() runs them; probabilities."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([list(token_ids)]), logits_V[None].clone())[0].double().softmax(-1)


def assume_no_close_call(logits_V: torch.Tensor, params: SamplingParams, token_ids) -> None:
    """Leave out cases in which a float32 rounding of the cumulative sum decides who passes top-p or min-p."""
    supports = set()
    for shift in (-5e-6, 5e-6):
        top_p = params.top_p + shift if params.top_p < 1 else 1.0
        min_p = min(params.min_p + shift, 1.0) if params.min_p > 0 else 0.0
        probabilities_V = oracle(logits_V, replace(params, top_p=top_p, min_p=min_p), token_ids)
        supports.add(tuple((probabilities_V > 0).tolist()))
    assume(len(supports) == 1)


def draws(monkeypatch, logits_V, params, token_ids, numbers) -> list[int]:
    """What sample() gives for uniform numbers of our choice."""
    tokens = []
    for number in numbers:
        monkeypatch.setattr(sampler, "uniform", lambda seed, position, number=number: number)
        tokens.append(sample(logits_V, params, 0, token_ids))
    return tokens


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, VOCAB, 100]),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.1, 2.0]),
)


@given(params=sampling_params, seed=st.integers(0, 10_000), token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_the_distribution_is_that_of_transformers(params, seed, token_ids):
    logits_V = random_logits(seed)
    assume_no_close_call(logits_V, params, token_ids)
    expected_V = oracle(logits_V, params, token_ids)
    order = expected_V.sort(descending=True, stable=True)
    allowed = int((expected_V > 0).sum())
    # Each token is the draw exactly for its own stretch of [0, 1): likeliest first.
    edges = [0.0, *order.values[:allowed].cumsum(0).tolist()]
    numbers, tokens = [], []
    for index in range(allowed):
        start, stop = edges[index], edges[index + 1]
        margin = 1e-6
        if stop - start > 4 * margin:
            numbers += [start + margin, (start + stop) / 2, stop - margin]
            tokens += [int(order.indices[index])] * 3
    assert tokens
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert draws(monkeypatch, logits_V, params, token_ids, numbers) == tokens


@given(params=sampling_params, seed=st.integers(0, 10_000), size=st.sampled_from([1, 2, 40, 1000]))
def test_the_filters_keep_the_same_tokens_as_transformers(params, seed, size):
    logits_V = random_logits(seed, size)
    assume_no_close_call(logits_V, params, [0])
    expected_V = oracle(logits_V, params, [0])
    scaled_V = (penalised(logits_V, params.repetition_penalty, [0]) / params.temperature).double()
    sorted_V, ids_V = scaled_V.sort(descending=True, stable=True)
    kept = set(ids_V[: sampler._filter(sorted_V, params)].tolist())
    assert kept == set(expected_V.nonzero().flatten().tolist())


@given(seed=st.integers(0, 1000), token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60))
def test_the_repetition_penalty_is_that_of_transformers(seed, token_ids):
    logits_V = random_logits(seed)
    ids = torch.tensor([token_ids], dtype=torch.int64)
    expected_V = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits_V[None].clone())[0]
    assert torch.equal(penalised(logits_V, 1.3, token_ids), expected_V)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    assert sample(torch.tensor([0.0, 3.0, 1.0]), SamplingParams(), 0, [1]) == 1
    assert sample(torch.tensor([0.0, 2.0, 2.0, -1.0, 2.0]), SamplingParams(), 0, [1]) == 1
    assert sample(torch.zeros(50_000), SamplingParams(), 0, [1]) == 0
    tied_V = random_logits(0, 50_000)
    tied_V[[123, 4_567, 49_999]] = 100.0
    assert sample(tied_V, SamplingParams(), 0, [1]) == 123


def test_greedy_does_not_depend_on_the_seed_but_on_the_repetition_penalty():
    logits_V = torch.tensor([1.0, 2.0, 1.9])
    assert {sample(logits_V, SamplingParams(), seed, [1]) for seed in range(20)} == {1}
    assert sample(logits_V, SamplingParams(repetition_penalty=1.5), 0, [1]) == 2
    assert sample(logits_V, SamplingParams(repetition_penalty=1.5), 0, [0]) == 1


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_p=1e-9),
               SamplingParams(temperature=1.0, min_p=1.0), SamplingParams(temperature=1e-4)]
)  # fmt: skip
def test_filters_at_their_limit_are_greedy(params):
    logits_V = random_logits(3)
    assert {sample(logits_V, params, seed, [1, 2]) for seed in range(30)} == {int(logits_V.argmax())}


def test_the_extreme_uniform_numbers_give_the_first_and_the_last_token(monkeypatch):
    logits_V = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    below_one = math.nextafter(1.0, 0.0)
    assert draws(monkeypatch, logits_V, SamplingParams(temperature=1.0), [1], [0.0, below_one]) == [2, 0]


def test_a_tokens_stretch_of_numbers_begins_with_its_lower_edge(monkeypatch):
    quarters = [0.0, 0.25, 0.5, 0.75]
    assert draws(monkeypatch, torch.zeros(4), SamplingParams(temperature=1.0), [1], quarters) == [0, 1, 2, 3]


def test_top_k_keeps_k_tokens_even_of_equals():
    params = SamplingParams(temperature=1.0, top_k=3)
    assert {sample(torch.zeros(50_000), params, seed, [1]) for seed in range(60)} == {0, 1, 2}


def test_a_token_of_probability_zero_is_never_drawn():
    logits_V = torch.full((10,), -math.inf)
    logits_V[[3, 7]] = 0.0
    tokens = {sample(logits_V, SamplingParams(temperature=2.0), seed, [1]) for seed in range(200)}
    assert tokens == {3, 7}


@pytest.mark.parametrize(
    "params",
    few(
        [
            SamplingParams(temperature=1.3, top_p=0.8),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.7, top_k=5),
            SamplingParams(temperature=1.0, min_p=0.1),
        ]
    ),
)
def test_draws_follow_the_probabilities(params):
    logits_V = random_logits(11, 12, scale=1.5)
    probabilities = oracle(logits_V, params, [0]).tolist()
    num_draws = 4000
    counts = Counter(sample(logits_V, params, 5, [0] * position) for position in range(1, num_draws + 1))
    for token, probability in enumerate(probabilities):
        deviation = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) <= 4.5 * deviation, token
    expected = [(token, num_draws * p) for token, p in enumerate(probabilities) if p > 0]
    chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in expected)
    degrees = len(expected) - 1
    assert chi_square <= degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.slow
def test_seeds_draw_independently_of_each_other():
    logits_V = torch.zeros(4)
    pairs = Counter(
        tuple(sample(logits_V, SamplingParams(temperature=1.0), seed, [0] * position) for position in (3, 4))
        for seed in range(3200)
    )
    assert len(pairs) == 16
    assert all(abs(count - 200) < 4.5 * math.sqrt(200) for count in pairs.values())


def test_the_draw_depends_on_seed_and_position_alone():
    params = SamplingParams(temperature=1.0)
    logits_V = random_logits(1)
    alone = sample(logits_V, params, 7, [1, 2, 3])
    torch.manual_seed(99)
    sample(random_logits(2), params, 8, [4])
    torch.rand(5)
    assert sample(logits_V, params, 7, [9, 9, 9]) == alone
    assert sample(logits_V.clone(), SamplingParams(temperature=1.0, seed=5), 7, [1, 2, 3]) == alone


def test_uniform_numbers_differ_by_seed_and_position_and_repeat():
    grid = {(seed, position): uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(set(grid.values())) == len(grid)
    assert all(0 <= number < 1 for number in grid.values())
    assert all(uniform(*key) == number for key, number in grid.items())
    assert uniform(2**63 - 1, 2**40) == uniform(2**63 - 1, 2**40) != uniform(2**63 - 2, 2**40)


def test_uniform_numbers_are_the_same_on_every_machine():
    numbers = [uniform(seed, position) for seed, position in ((0, 1), (1, 0), (2**63 - 1, 16_000_000))]
    assert numbers == [0.5023796042735054, 0.3035680343067586, 0.28774134490128656]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_are_left_as_they_are(temperature):
    logits_V = random_logits(4)
    before_V = logits_V.clone()
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    sample(logits_V, params, 0, [1, 2, 3])
    logprobs(logits_V, 5, 0)
    assert torch.equal(logits_V, before_V)


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, 100])
def test_logprobs_are_the_log_softmax_of_the_best_and_the_chosen(count):
    logits_V = random_logits(6)
    exact_V = logits_V.double().log_softmax(-1)
    order = logits_V.argsort(descending=True).tolist()
    best = order[:count]
    for chosen in (order[0], order[4], order[-1]):
        found = logprobs(logits_V, count, chosen)
        assert list(found) == best + [chosen] * (chosen not in best)
        for token, logprob in found.items():
            assert abs(logprob - float(exact_V[token])) <= 1e-5
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_logprobs_of_the_whole_vocabulary_sum_to_one():
    assert math.isclose(sum(map(math.exp, logprobs(random_logits(8), VOCAB, 0).values())), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 101),
    ],
)
def test_sampling_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"^{name} is {value!r}: set it to "):
        SamplingParams(**{name: value})


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="stop string is empty"):
        SamplingParams(stop=("a", ""))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[math.nan, 1.0], [1.0, math.inf], [-math.inf, -math.inf]], ids=str)
def test_logits_that_leave_no_token_a_probability_are_an_error(broken, temperature):
    with pytest.raises(ValueError, match="no token has a probability"):
        sample(torch.tensor(broken), SamplingParams(temperature=temperature, top_p=0.9), 0, [1])
