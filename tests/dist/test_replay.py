"""The simulator takes the recording of a live engine, with the times that steps took, through the same Steps."""

import random
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from longhelix import Layout, SamplingParams, ServiceLevel
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.core import TokenCore
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.scheduler.corrected_cost import CorrectedCost
from longhelix.scheduler.recording import Aborted, Added, Completed, Scheduled
from longhelix.scheduler.scheduler import Scheduler
from longhelix.simulate.replay import Replay
from oracle import FAMILIES, VOCAB, make_oracle, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

REQUESTS, MOST_TOKENS = 24, 96
DOCUMENT = [(7 * index + index // 9) % VOCAB for index in range(60)]
OPTIONS = EngineOptions(
    device="cpu",
    policy="lars",
    block_tokens=4,
    max_model_len=MOST_TOKENS,
    tbt_target_s=0.004,
    max_running=8,
)


def config_of(folder, layout, placement="striped"):
    made = make_oracle(FAMILIES["llama"], folder)
    save_tokenizer_files(made.path)
    more = {"kv_cache_tokens": 72 * layout.kvp, "placement": placement, "growth_limit_tokens": 24}
    return resolve(open_checkpoint(str(made.path)), layout, replace(OPTIONS, **more))


def serve(core):
    """Random traffic while steps run: some polls wait for a step, some do not. What each request held and took at its
    end, and why it ended."""
    chance, ids, usages, reasons = random.Random(5), [], {}, {}
    while len(ids) < REQUESTS or core.has_work:
        if len(ids) < REQUESTS and chance.random() < 0.4:
            own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 8))]
            prompt = DOCUMENT[: chance.choice([0, 5, 16, 24, 40])] + own
            new_tokens = chance.randint(1, MOST_TOKENS - len(prompt) - 10)
            stops = tuple(chance.sample(range(VOCAB), 2))
            service = ServiceLevel(ttft_slo_s=chance.choice([None, 0.01, 5.0]), client=chance.choice("ab"))
            ids.append(core.add(prompt, SamplingParams(new_tokens, stop_token_ids=stops), service).id)
        if ids and chance.random() < 0.02:
            aborted = chance.choice(ids)
            usage = core.abort(aborted)
            if usage is not None:
                usages[aborted], reasons[aborted] = usage, "abort"
        for event in core.poll(chance.choice([0.0, 0.001, 1.0])):
            if event.finish_reason is not None:
                usages[event.request_id], reasons[event.request_id] = event.usage, event.finish_reason
    return usages, reasons


LAYOUTS = {
    "one stage": (Layout(kvp=2), "striped"),
    "two stages": (Layout(kvp=2, pp=2), "striped"),
    "own clocks": (Layout(kvp=2, ffn_replicas=2), "growing"),
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def recorded(request, tmp_path_factory):
    """What was recorded, and what makes another scheduler of that engine."""
    events = []
    config = config_of(tmp_path_factory.mktemp("llama"), *request.param)
    with closing(TokenCore(config, on_event=events.append)) as core:
        usages, reasons = serve(core)
        config, cost, cut = core.config.scheduler, core._pool.cost, core._pool.cut
    assert config.steps.adaptive
    assert config.cache.prefix_cache
    return events, usages, reasons, lambda: Scheduler(config, cost, cut=cut)


def most_in_flight(events):
    in_flight = most = 0
    for event in events:
        in_flight += isinstance(event, Scheduled) and event.step is not None
        in_flight -= isinstance(event, Completed)
        most = max(most, in_flight)
    return most


def first_difference(replay, events):
    """The first replayed event that differs from the recording, and the recorded one; None if all are equal."""
    seen = 0
    while replay.step():
        for again in replay.events[seen:]:
            if again != events[seen]:
                return again, events[seen]
            seen += 1
    return None


def test_the_recording_has_what_makes_a_replay_hard(recorded):
    events, usages, reasons, _ = recorded
    assert most_in_flight(events) in (2, 3, 4)  # one more than stages, or two for each clock
    assert any(usage.preemptions for usage in usages.values())
    assert any(usage.cached_tokens for usage in usages.values())
    assert Counter(reasons.values()).keys() == {"abort", "length", "stop"}
    kinds = Counter(type(event) for event in events)
    assert kinds[Added] == len(usages) == REQUESTS
    assert kinds[Aborted]
    sizes = {
        chunk.num_tokens
        for event in events
        if isinstance(event, Scheduled) and event.step
        for chunk in event.step.chunks
    }
    assert len(sizes) > 3


def test_the_simulator_makes_the_same_steps_one_by_one(recorded):
    events, _, reasons, make_scheduler = recorded
    replay = Replay(make_scheduler(), events)
    assert first_difference(replay, events) is None
    assert len(replay.events) == len(events)
    outcome = replay.outcome(2)
    assert outcome.requests == REQUESTS
    assert outcome.finished == REQUESTS - Counter(reasons.values())["abort"]
    results = [event.result for event in events if isinstance(event, Completed)]
    assert outcome.tokens >= sum(len(result.sampled) for result in results) - 2 * REQUESTS  # past their ends
    assert 0 < outcome.busy_s <= sum(result.measured.taken_s for result in results) + 1e-6


def test_steps_that_took_other_times_are_other_steps(recorded, monkeypatch):
    """A replay hangs on what was measured: with other times it goes another way. What this machine measured may be as
    long, or as short, as a correction goes: so with longer ones or with shorter ones."""
    events, _, _, make_scheduler = recorded
    observe, found = CorrectedCost.observe, []
    for times in (1e3, 1e-3):
        monkeypatch.setattr(
            CorrectedCost, "observe", lambda cost, work, taken_s, times=times: observe(cost, work, times * taken_s)
        )
        found.append(first_difference(Replay(make_scheduler(), events), events))
    assert any(difference is not None for difference in found)
