"""Logit bias, penalties of presence and frequency, min_tokens, and guides: in parts of the vocabulary and through the
runner, beside a dense formula over the whole of it."""

import random
from array import array
from dataclasses import replace

import msgspec
import pytest
import torch
from test_runner import EOS, VOCAB, make_request, make_runner

import sorted_rows
from dense_adjustments import adjusted
from longhelix.compute.runner import matchers
from longhelix.compute.runner.adjustments import Adjustments, TokenCounts
from longhelix.compute.runner.matchers import Matchers
from longhelix.scheduler import guide as guide_module
from longhelix.scheduler.guide import Guide, TokenTable
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import InitialKV, NewSequence, SequenceChanges, Step
from longhelix.spec.layout import Layout
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use is here"),
        ],
    ),
]
PENALTIES = {"presence_penalty": 1.3, "frequency_penalty": 0.6}
BIASED = {"logit_bias": {0: 2.3, 5: -100, 10: 0.25}}
FEW_BLOCKS = {"num_blocks": 4, "max_model_len": 64}


def new_sequence(prompt_tokens, sampling):
    return NewSequence(0, sampling, 0, prompt_tokens + sampling.max_new_tokens, InitialKV((1,), False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(30))
def test_parts_of_the_vocabulary_are_adjusted_as_the_whole(seed, device):
    """Parts may be empty, and all of one may be stop tokens. To the bit."""
    chance = random.Random(seed)
    size = chance.choice([5, 11, 300])
    generated = chance.choices(range(size), k=chance.choice([0, 1, 40]))
    ids = range(size)
    params = SamplingParams(
        max_new_tokens=100,
        logit_bias={token_id: chance.uniform(-100, 100) for token_id in chance.sample(ids, chance.choice([0, 1, 4]))},
        presence_penalty=chance.choice([0, 2, -1.7]),
        frequency_penalty=chance.choice([0, 0.3, -2]),
        min_tokens=chance.choice([0, 1, 40, 41]),
        stop_token_ids=tuple(chance.sample(ids, chance.choice([0, 1, 4]))),
    )
    eos, prompt_tokens, ranks = (chance.randrange(size),), chance.choice([1, 9]), chance.choice([1, 3, 7])
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 10
    found = []
    for rank in range(ranks):
        part = Layout(tpa=ranks).vocabulary(size, rank)
        adjustments = Adjustments(new_sequence(prompt_tokens, params), part, eos, torch.device(device))
        for token_id in generated if params.counts_tokens else ():
            adjustments.counts.add_one(token_id)
        logits_v = logits_V[part.start : part.stop].clone().to(device)
        adjustments.adjust(logits_v, prompt_tokens + len(generated))
        found.append(logits_v.cpu())
    expected_V = adjusted(logits_V, params, generated, {*params.stop_token_ids, *eos})
    assert torch.cat(found).view(torch.int32).tolist() == expected_V.view(torch.int32).tolist()
    assert (adjustments.counts is not None) == (params.presence_penalty != 0 or params.frequency_penalty != 0)


def test_counts_go_on_while_logits_are_penalised():
    """What was shown to a row does not hold on to the memory that grows."""
    counts, rows = TokenCounts(range(100, 200)), []
    for token_id in [150, 99, 150, 200, 101, 150]:
        counts.add_one(token_id)
        rows.append(torch.zeros(100))
        counts.penalise(rows[-1], 0.5, 1.0)
    assert rows[0].nonzero().flatten().tolist() == [50]
    assert (rows[-1][50], rows[-1][1], rows[-1].sum()) == (-3.5, -1.5, -5.0)


def expected_tokens(runner, request):
    """Those of whole rows that are sorted."""
    tokens, params = [], request.sampling
    stops = {*params.stop_token_ids, *EOS}
    seen_V = torch.zeros(VOCAB, dtype=torch.bool)
    seen_V[request.prompt_token_ids] = True
    token = request.prompt_token_ids[-1]
    while len(tokens) < params.max_new_tokens:
        logits_V = adjusted(runner.model.logits(torch.tensor([[float(token)]]))[0], params, tokens, stops)
        position = len(request.prompt_token_ids) + len(tokens)
        token = sorted_rows.sample(logits_V, params, request.seed, position, seen_V)
        if token in request.stop_token_ids:
            break
        tokens.append(token)
        seen_V[token] = True
    return tokens


def run_all(runner, requests, drafter=None, **settings):
    """Every request's tokens, its log-probabilities and what it took, and the sequences that ranks heard of."""
    config = {"kvp": 1, "num_blocks": 64, "max_model_len": 512, "chunk_tokens": 7} | settings
    scheduler = Scheduler(scheduler_config(**config), drafter=drafter)
    for request in requests:
        scheduler.add(request)
    tokens, logprobs, usages, new = ({request.id: [] for request in requests} for _ in range(4))
    while (step := scheduler.schedule(0.0)) is not None:
        step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)
        for one in step.changes.new:
            new[one.id].append(one)
        for event in scheduler.complete(runner.execute(step)):
            if event.sampled is not None:
                tokens[event.request_id].append(event.sampled.token_id)
                logprobs[event.request_id].append(event.sampled.logprobs)
            if event.finish_reason is not None:
                usages[event.request_id] = event.usage
    return tokens, logprobs, usages, new


ASKED = [
    PENALTIES,
    PENALTIES | {"repetition_penalty": 1.7, "logprobs": 3},
    BIASED,
    {"logit_bias": {3: 100}},
    {"min_tokens": 12},
    {"presence_penalty": -2, "frequency_penalty": -0.4, "temperature": 1.5},
    BIASED | PENALTIES | {"min_tokens": 30, "temperature": 2.0, "top_p": 0.9, "repetition_penalty": 0.8},
    BIASED | {"min_tokens": 5, "temperature": 0.9, "top_k": 4, "min_p": 0.01},
]


@pytest.mark.parametrize("asked", ASKED)
def test_of_a_batch_those_that_ask_are_adjusted_and_no_others(asked):
    runner = make_runner()
    others = {"temperature": 1.1, "repetition_penalty": 1.2}
    requests = [make_request(0, 20, 30, **others), make_request(1, 9, 30, **asked), make_request(2, 3, 30)]
    found, *_ = run_all(runner, requests)
    assert found == {request.id: expected_tokens(runner, request) for request in requests}
    assert [seq for seq, _ in runner.running.decoding.records] == []  # all have ended


@pytest.mark.parametrize("asked", ASKED)
def test_what_was_generated_before_a_preemption_counts(asked):
    runner = make_runner()
    requests = [make_request(0, 20, 40, **asked), replace(make_request(1, 20, 40, **asked), arrival_s=1.0)]
    found, _, usages, new = run_all(runner, requests, **FEW_BLOCKS)
    assert sum(usage.preemptions for usage in usages.values()) > 0
    assert found == {request.id: expected_tokens(runner, request) for request in requests}
    for request in requests:
        first, *resumed = new[request.id]
        assert first.known.generated_ids == b""
        for one in resumed:
            generated = array("i", one.known.generated_ids).tolist()
            counted = found[request.id][: 40 - one.sampling.max_new_tokens]
            assert generated == (counted if request.sampling.counts_tokens else [])


@pytest.mark.parametrize("asked", ASKED)
def test_a_cached_prefix_counts_for_none_of_what_is_generated(asked):
    runner = make_runner()
    requests = [make_request(0, 40, 8), make_request(0, 40, 30, **asked)]
    requests[1] = replace(requests[1], id=1)
    found, _, usages, _ = run_all(runner, requests, prefix_cache=True, max_running=1)
    assert usages[1].cached_tokens == 32
    assert found == {request.id: expected_tokens(runner, request) for request in requests}


@pytest.mark.parametrize("min_tokens", [0, 1, 7, 20])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.5}])
def test_no_stop_token_ends_a_text_before_its_least_tokens(min_tokens, asked):
    """Both are wanted more than all others, always."""
    stops = {*EOS, 7}
    wanted = {"logit_bias": dict.fromkeys(stops, 100), "stop_token_ids": (7,), "min_tokens": min_tokens}
    runner, request = make_runner(), make_request(0, 5, 20, **wanted | asked)
    ending = replace(request, stop_token_ids=frozenset(stops))
    found, *_ = run_all(runner, [ending])
    assert len(found[0]) == min_tokens
    assert stops.isdisjoint(found[0])
    ignored = replace(request, stop_token_ids=frozenset([7]), sampling=replace(request.sampling, ignore_eos=True))
    found, *_ = run_all(runner, [ignored])
    assert stops.isdisjoint(found[0][:min_tokens])
    assert found[0] == expected_tokens(runner, ignored)


def test_a_bias_of_100_forces_a_token_and_of_minus_100_forbids_it():
    runner = make_runner()
    requests = [make_request(0, 5, 20, logit_bias={10: 100}), make_request(1, 5, 20, logit_bias={10: -100, 0: -100})]
    found, *_ = run_all(runner, requests)
    assert set(found[0]) == {10}
    assert {0, 10}.isdisjoint(found[1])
    free, *_ = run_all(runner, [make_request(1, 5, 20)])
    assert not {0, 10}.isdisjoint(free[1])


def test_log_probabilities_are_those_of_the_model():
    runner = make_runner()
    asked = BIASED | PENALTIES | {"min_tokens": 20, "repetition_penalty": 1.5, "temperature": 1.0}
    request = make_request(0, 5, 20, logprobs=VOCAB, **asked)
    found, logprobs, *_ = run_all(runner, [request])
    before = [request.prompt_token_ids[-1], *found[0][:-1]]
    for token_id, given in zip(before, logprobs[0], strict=True):
        own_V = runner.model.logits(torch.tensor([[float(token_id)]]))[0].log_softmax(-1)
        assert [given[other] for other in range(VOCAB)] == own_V.tolist()


def test_ranks_without_a_share_in_the_choice_keep_nothing():
    """Another instance samples, or another stage."""
    new = msgspec.structs.replace(
        new_sequence(4, SamplingParams(min_tokens=3, **PENALTIES)), kv=InitialKV((1, 1), False)
    )
    for instances, kept in (((), True), ((0, 1), True), ((1, 0), False)):
        runner = make_runner(kvp=2)
        runner.running.admit(Step(1, changes=SequenceChanges(new=(msgspec.structs.replace(new, instances=instances),))))
        assert (runner.running.by_id[0].adjustments is not None) == kept
    runner = make_runner()
    runner.running._has_head = False
    runner.running.admit(Step(1, changes=SequenceChanges(new=(new,))))
    assert runner.running.by_id[0].adjustments is None


# Guides: of a vocabulary of 11 tokens, in which id 4 ends a text.
TABLE = TokenTable((b"a", b"b", b"ab", b"ba", b"<e>", b"c", b"ca", b"", b"bb", b"a", b"d"), EOS, EOS)
GUIDED = [
    {"guide": Guide("regex", "(ab|ba)*c(a|b)*d")},
    {"guide": Guide("grammar", 'start: "a" | "b" start "b"'), "temperature": 3.0},
    {"guide": Guide("regex", "[ab]{3,9}"), "temperature": 1.0, "min_tokens": 5, "repetition_penalty": 1.4, **PENALTIES},
    {"guide": Guide("regex", "[abc]*"), "temperature": 9.0, "logit_bias": {0: 2.0}, "top_p": 0.8, "min_tokens": 25},
    {"guide": Guide.of_choices(["abc", "d"]), "min_tokens": 9, "stop_token_ids": (2,)},
]


def allowed_logits(logits_V, params, generated, stops):
    """Those of a whole row: the guide goes before all else."""
    matcher = Matchers(TABLE).new(params.guide)
    for token_id in generated:
        matcher.add_one(token_id)
    allowed_V = torch.from_numpy(matcher.allowed())
    early = len(generated) < params.min_tokens
    going_on_V = allowed_V & torch.tensor([token_id not in stops for token_id in range(len(allowed_V))])
    kept_V = going_on_V if early and going_on_V.any() else allowed_V
    late = replace(params, min_tokens=0)
    return adjusted(logits_V, late, generated, stops).masked_fill(~kept_V, -torch.inf)


def guided_tokens(runner, request):
    tokens, params = [], request.sampling
    stops = {*params.stop_token_ids, *EOS}
    seen_V = torch.zeros(VOCAB, dtype=torch.bool)
    seen_V[request.prompt_token_ids] = True
    token = request.prompt_token_ids[-1]
    while len(tokens) < params.max_new_tokens:
        logits_V = allowed_logits(runner.model.logits(torch.tensor([[float(token)]]))[0], params, tokens, stops)
        position = len(request.prompt_token_ids) + len(tokens)
        token = sorted_rows.sample(logits_V, params, request.seed, position, seen_V)
        if token in request.stop_token_ids:
            break
        tokens.append(token)
        seen_V[token] = True
    return tokens


def guided_runner():
    runner = make_runner()
    runner.running.set_token_table(TABLE)
    return runner


def ending(request):
    return replace(request, stop_token_ids=frozenset({*EOS, *request.sampling.stop_token_ids}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(20))
def test_parts_of_the_vocabulary_are_guided_as_the_whole(seed, device):
    """Parts may be empty, and all of one may be left out. To the bit."""
    chance = random.Random(seed)
    params = SamplingParams(max_new_tokens=100, **chance.choice(GUIDED) | {"temperature": 0.0})
    generated, matcher = [], Matchers(TABLE).new(params.guide)
    for _ in range(chance.choice([0, 1, 2])):
        allowed = [token_id for token_id in matcher.allowed().nonzero()[0].tolist() if token_id not in EOS]
        if not allowed:
            break
        generated.append(chance.choice(allowed))
        matcher.add_one(generated[-1])
    ranks, logits_V = chance.choice([1, 3, 7, 13]), torch.randn(11, generator=torch.Generator().manual_seed(seed)) * 10
    found = []
    for rank in range(ranks):
        part, own = Layout(tpa=ranks).vocabulary(11, rank), Matchers(TABLE).new(params.guide)
        adjustments = Adjustments(new_sequence(9, params), part, EOS, torch.device(device), own)
        for record in adjustments.records:
            for token_id in generated:
                record.add_one(token_id)
        logits_v = logits_V[part.start : part.stop].clone().to(device)
        assert adjustments.adjust(logits_v, 9 + len(generated)) == ""
        found.append(logits_v.cpu())
    expected_V = allowed_logits(logits_V, params, generated, {*params.stop_token_ids, *EOS})
    assert torch.cat(found).view(torch.int32).tolist() == expected_V.view(torch.int32).tolist()


@pytest.mark.parametrize("asked", GUIDED)
def test_of_a_batch_those_with_a_guide_follow_it_and_no_others(asked):
    runner = guided_runner()
    others = {"temperature": 1.1, "repetition_penalty": 1.2}
    requests = [make_request(0, 20, 30, **others), ending(make_request(1, 9, 30, **asked)), make_request(2, 3, 30)]
    found, *_ = run_all(runner, requests)
    assert found[0] == expected_tokens(runner, requests[0])
    assert found[1] == guided_tokens(runner, requests[1])
    assert found[2] == expected_tokens(runner, requests[2])


@pytest.mark.parametrize("asked", GUIDED[:4])
def test_a_guide_goes_on_after_a_preemption(asked):
    runner = guided_runner()
    requests = [ending(make_request(0, 20, 40, **asked)), make_request(1, 20, 40)]
    requests[1] = replace(requests[1], arrival_s=-1.0)
    found, _, usages, new = run_all(runner, requests, **FEW_BLOCKS)
    assert found[0] == guided_tokens(runner, requests[0])
    assert found[1] == expected_tokens(runner, requests[1])
    for one in new[0][1:]:
        generated = array("i", one.known.generated_ids).tolist()
        assert generated == found[0][: 40 - one.sampling.max_new_tokens]
    assert len(found[0]) < 12 or usages[0].preemptions > 0


def test_guides_of_a_step_are_compiled_once_and_those_beyond_what_is_kept_go_after_it(monkeypatch):
    monkeypatch.setattr(guide_module, "_MOST_KEPT", 1)
    runner, guides = guided_runner(), [Guide("regex", "a+"), Guide("regex", "b+"), Guide("regex", "c+")]

    def begin(step_id, *places):
        news = [new_sequence(5, SamplingParams(guide=guides[place])) for place in places]
        runner.running.admit(
            Step(
                step_id,
                changes=SequenceChanges(
                    new=tuple(msgspec.structs.replace(new, id=10 * step_id + at) for at, new in enumerate(news))
                ),
            )
        )
        return runner.running._matchers.steps, [guide in runner.running._matchers._compiled_guides for guide in guides]

    assert begin(1, 0, 1, 0) == (2, [True, False, False])
    assert begin(2, 1, 0, 2) == (4, [False, False, True])


def test_a_guide_that_cannot_go_on_ends_its_request_alone(monkeypatch):
    runner = guided_runner()
    monkeypatch.setitem(matchers._LIMITS, "step_max_items", 2)
    runner.running.set_token_table(TABLE)
    requests = [
        ending(make_request(1, 9, 30, guide=Guide("grammar", 'start: "a" | "b" start "b" | "ab"'))),
        make_request(2, 3, 30),
    ]
    ends, errors = {}, {}
    scheduler = Scheduler(scheduler_config(kvp=1, num_blocks=64, max_model_len=512, chunk_tokens=7))
    for request in requests:
        scheduler.add(request)
    while (step := scheduler.schedule(0.0)) is not None:
        for event in scheduler.complete(runner.execute(step)):
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason
                errors[event.request_id] = "" if event.sampled is None else event.sampled.error
    assert ends == {1: "error", 2: "length"}
    assert errors[1].startswith("the guide cannot be followed any further: ")
    assert errors[2] == ""


def test_what_guides_take_counts_as_progress():
    """Each one that is compiled, each token that it is told and each mask."""
    runner = guided_runner()
    runner.running.admit(
        Step(1, changes=SequenceChanges(new=(new_sequence(4, SamplingParams(guide=Guide("regex", "[ab]{12}"))),)))
    )
    assert runner.progress().guide_steps == 1
    run_all(runner, [ending(make_request(1, 5, 12, guide=Guide("regex", "[bc]{12}")))])
    assert runner.progress().guide_steps == 1 + 1 + 12 + 11


def test_log_probabilities_stay_the_models_own():
    runner = guided_runner()
    request = ending(make_request(0, 5, 12, logprobs=11, guide=Guide("regex", "[abc]{12}")))
    found, logprobs, _, _ = run_all(runner, [request])
    token = request.prompt_token_ids[-1]
    for chosen, told in zip(found[0], logprobs[0], strict=True):
        own_V = runner.model.logits(torch.tensor([[float(token)]]))[0].log_softmax(-1)
        assert told == {token_id: pytest.approx(float(own_V[token_id]), abs=1e-5) for token_id in range(VOCAB)}
        token = chosen
