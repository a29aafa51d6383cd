"""KVP instances of the tied layout with clocks of their own give what one rank gives, and wait for nobody else."""

import time

import pytest

from longhelix import LLM, Layout, SamplingParams
from longhelix.engine.workers import watchdog
from longhelix.scheduler.recording import Completed, Scheduled
from oracle import FAMILIES, NEW_TOKENS, WITH_EXPERTS

pytestmark = pytest.mark.dist

MODELS = {"llama": FAMILIES["llama"]} | {name: WITH_EXPERTS[name] for name in ("qwen3_moe", "deepseek_v3")}
LAYOUTS = [(2, 1), (3, 1), (2, 2)]
PLACEMENTS = {
    "local": {},
    "growing": {"growth_limit_tokens": 12},
    "auto": {"kvp_threshold_tokens": 24},
}
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)


def engine(oracle, kvp, tpa=1, placement="growing", **more):
    settings = {"dtype": "float32", "block_tokens": 4, "max_model_len": 64, "placement": placement}
    layout = Layout(kvp=kvp, tpa=tpa, tpf=tpa, ffn_replicas=kvp)
    return LLM(str(oracle.path), layout, **settings | PLACEMENTS[placement] | more)


def record(llm):
    """A list that gets every event between the loop and the scheduler from now on."""
    events = []
    llm._core._loop.on_event = events.append
    return events


def steps_of(events):
    return [event.step for event in events if isinstance(event, Scheduled) and event.step is not None]


CASES = [
    (model, layout, placement, chunk_tokens)
    for model in MODELS
    for layout in LAYOUTS
    for placement in PLACEMENTS
    for chunk_tokens in (1, 16, 512)
]
# In CI every model, layout, placement and chunk size, and some of their pairs.
IN_CI = {0, 13, 26, 30, 43, 47, 56, 60, 79}


@pytest.mark.parametrize(
    ("model", "layout", "placement", "chunk_tokens"),
    [case if number in IN_CI else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_tokens_equal_transformers(oracles, model, layout, placement, chunk_tokens):
    oracle = oracles(model)
    with engine(oracle, *layout, placement, chunk_tokens=chunk_tokens) as llm:
        events = record(llm)
        results = llm.generate(oracle.prompts, GREEDY)
    assert [result.token_ids for result in results] == [list(tokens) for tokens in oracle.tokens]
    teams = {step.turn.instances for step in steps_of(events) if step.work.rows}
    assert all(teams)
    longest = results[-1].kv_tokens_per_rank
    if placement == "local":
        assert sorted(longest) == [0] * (layout[0] - 1) + [len(oracle.prompts[-1]) + NEW_TOKENS - 1]
        assert all(len(team) == 1 for team in teams)
    else:
        assert all(longest)
        assert tuple(range(layout[0])) in teams


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """Rank 0 stands still in its third step until rank 1 has done ten."""
    program = """
import os, time
from pathlib import Path
from longhelix.compute.runner.runner import ModelRunner
execute, done, count = ModelRunner.execute, Path(os.environ["DONE"]), 0

def stand(runner, step):
    global count
    count += 1
    until_s = time.monotonic() + 20
    while runner.mesh.rank == 0 and count == 3 and not done.exists():
        if time.monotonic() > until_s:
            raise RuntimeError("the other instance has not gone on")
        time.sleep(0.001)
    result = execute(runner, step)
    if runner.mesh.rank == 1 and count == 10:
        done.touch()
    return result

ModelRunner.execute = stand
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DONE", str(tmp_path / "done"))


@pytest.mark.slow
def test_no_instance_waits_for_one_that_has_nothing_for_it(oracles, standing):
    """Two short requests, each on an instance of its own: one stands, the other takes steps. Then both share a long
    one."""
    oracle = oracles("llama", 5, 7, 30)
    first, second, long = oracle.prompts
    with engine(oracle, 2, growth_limit_tokens=24) as llm:
        events = record(llm)
        short = llm.generate([first, second], GREEDY)
        alone, taken = steps_of(events), events.copy()
        events.clear()
        (last,) = llm.generate([long], GREEDY)
    assert [result.token_ids for result in (*short, last)] == [list(tokens) for tokens in oracle.tokens]
    assert {step.turn.instances for step in alone} == {(0,), (1,)}
    # Nine of instance 1 came back before the third of instance 0, which began with the tenth.
    by_id = {step.id: step.turn.instances for step in alone}
    order = [by_id[event.result.step_id] for event in taken if isinstance(event, Completed)]
    third = [at for at, instances in enumerate(order) if instances == (0,)][2]
    assert order[:third].count((1,)) >= 9
    assert (0, 1) in {step.turn.instances for step in steps_of(events)}
    assert last.kv_tokens_per_rank == [24, 21]


@pytest.fixture
def slowed(tmp_path, monkeypatch):
    """After each of its steps a rank stands for 50 ms: rank 1, or those that the test names."""
    program = """
import os, time
from longhelix.compute.runner.runner import ModelRunner
execute = ModelRunner.execute

def slowly(runner, step):
    result = execute(runner, step)
    if str(runner.mesh.rank) in os.environ.get("SLOW", "1"):
        time.sleep(0.05)
    return result

ModelRunner.execute = slowly
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def poll(core, tokens, until=lambda: False):
    """Take what requests get, until there is no more."""
    while core.has_work and not until():
        for event in core.poll():
            tokens[event.request_id].append(event.sampled.token_id)


@pytest.mark.usefixtures("slowed")
def test_tokens_come_in_order_after_those_that_shared_a_request_part(oracles):
    """When the shared request ends, a step of both instances is in flight. One of them is done with its next one before
    the other is done with that."""
    oracle = oracles("llama", 5, 7, 30)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (NEW_TOKENS, NEW_TOKENS, 5)]
    with engine(oracle, 2, growth_limit_tokens=24, kv_cache_tokens=256) as llm:
        events, core = record(llm), llm._core
        tokens = {core.add(prompt, sampling).id: [] for prompt, sampling in zip(oracle.prompts, params, strict=True)}
        poll(core, tokens)
    expected = [list(each[: one.max_new_tokens]) for each, one in zip(oracle.tokens, params, strict=True)]
    assert list(tokens.values()) == expected
    instances = {step.id: step.turn.instances for step in steps_of(events)}
    assert list(instances.values()).count((0, 1)) < len(instances) - 10


@pytest.mark.slow
def test_an_instance_that_had_nothing_to_do_is_not_blamed(oracles, slowed, monkeypatch):
    oracle = oracles("llama", 5, 7, 30)
    monkeypatch.setenv("SLOW", "0 1")
    monkeypatch.setattr(watchdog, "FACTOR", 0.0)
    monkeypatch.setattr(watchdog, "GRACE_S", 1.0)
    with engine(oracle, 2, placement="local") as llm:
        core, begun_s = llm._core, time.monotonic()
        first = core.add(oracle.prompts[0], SamplingParams(max_new_tokens=55, ignore_eos=True))
        tokens = {first.id: []}
        poll(core, tokens, lambda: time.monotonic() > begun_s + 2)
        assert core.has_work
        second = core.add(oracle.prompts[1], GREEDY)
        tokens[second.id] = []
        poll(core, tokens)
    assert tokens[second.id] == list(oracle.tokens[1])


SAMPLED = {"temperature": 0.8, "top_k": 20, "seed": 5, "repetition_penalty": 1.3, "logprobs": 3}
SAMPLED |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.5, 190: -100}}


@pytest.mark.parametrize("execution", ["eager", "recorded", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_is_sampled_does_not_depend_on_who_shares_it(oracles, execution):
    """Penalties count tokens that the sampling instance alone has seen; others hear what it drew."""
    oracle = oracles("llama", 5, 7, 30)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, **SAMPLED)
    found = []
    for make in (
        lambda: LLM(str(oracle.path), dtype="float32", block_tokens=4, max_model_len=64),
        lambda: engine(oracle, 3, growth_limit_tokens=8, execution=execution),
    ):
        with make() as llm:
            found.append(llm.generate(oracle.prompts, params))
    for alone, shared in zip(*found, strict=True):
        assert shared.token_ids == alone.token_ids
        for own, other in zip(shared.logprobs, alone.logprobs, strict=True):
            assert own == pytest.approx(other, abs=1e-3)
    assert [len([held for held in result.kv_tokens_per_rank if held]) for result in found[1]] == [3, 3, 3]


@pytest.fixture
def gloo(tmp_path, monkeypatch):
    """Ranks do not find that they share memory."""
    program = "from longhelix.compute.parallel import fabric\nfabric._share_memory = lambda hosts: False\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("model", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_instances_meet_over_gloo(oracles, model):
    oracle = oracles(model)
    with engine(oracle, 3, chunk_tokens=16) as llm:
        results = llm.generate(oracle.prompts, GREEDY)
    assert [result.token_ids for result in results] == [list(tokens) for tokens in oracle.tokens]


@pytest.mark.slow
def test_a_message_tells_a_rank_nothing_of_others(oracles):
    """Rows and exchanged bytes are those of what instances share alone: local requests exchange nothing."""
    oracle = oracles("llama", 5, 7, 30)
    with engine(oracle, 3, placement="local") as llm:
        llm.generate(oracle.prompts, GREEDY)
        counters = llm._core.counters
    assert counters.exchanged_bytes == 0
    assert counters.rows == sum(len(prompt) + NEW_TOKENS - 1 for prompt in oracle.prompts)
