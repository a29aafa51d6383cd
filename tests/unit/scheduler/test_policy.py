"""Which request goes first: Medha's example, the order of each policy, and that none waits forever."""

from array import array
from collections import deque
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Engine, expected_output
from test_scheduler import config as engine_config
from test_scheduler import request as engine_request

from longhelix.errors import UserError
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.order import Order
from longhelix.scheduler.policy import POLICIES, Policy, make_policy
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.request import Request, SamplingParams, ServiceLevel
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.shares import Shares
from longhelix.scheduler.step import SampledToken, StepMeasurements, StepResult
from longhelix.scheduler.work import Work
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

TOKEN_S = 1e-3


class ByRow:
    """Each row takes a millisecond, and each step of decodes a tenth of one."""

    def seconds(self, work: Work) -> float:
        return TOKEN_S * work.chunk_rows + 0.1 * TOKEN_S * work.decode_rows + 1e-6


class Clock:
    """A runner whose steps take `slower` times what they are predicted to take, and the clock that they move."""

    def __init__(self, cost=None, slower=1):
        self.now_s, self.slower = 0.0, slower
        self.cost = cost or ByRow()
        self.results = deque()
        self.steps = []

    def submit(self, step):
        self.steps.append((self.now_s, step))
        taken_s = self.slower * self.cost.seconds(step.work)
        self.now_s += taken_s
        sampled = tuple(SampledToken(chunk.id, 1) for chunk in step.chunks if chunk.sample)
        self.results.append(StepResult(step.id, sampled, step.work.rows, measured=StepMeasurements(taken_s)))

    def collect(self, timeout_s):
        return self.results.popleft()


def request(id, tokens, arrival_s=0.0, new_tokens=1, **service):
    sampling = SamplingParams(max_new_tokens=new_tokens)
    prompt = array("i", [id] * tokens)
    return Request(id, prompt, sampling, frozenset(), 0, arrival_s, ServiceLevel(**service))


def config(**more):
    return scheduler_config(
        **{"kvp": 1, "num_blocks": 10_000, "max_model_len": 100_000, "chunk_tokens": 100, "max_running": 1000} | more
    )


def served(requests, slower=1, **more):
    """When each request had its first token, and the order in which they got it."""
    clock = Clock(slower=slower)
    loop = Loop(Scheduler(config(**more), clock.cost), clock, lambda: clock.now_s)
    left, first_s = sorted(requests, key=lambda one: one.arrival_s), {}
    while left or loop.has_work:
        while left and left[0].arrival_s <= clock.now_s:
            loop.add(left.pop(0))
        if not loop.has_work:
            clock.now_s = left[0].arrival_s
            continue
        stepped = loop.step()
        for event in () if stepped is None else stepped[1]:
            first_s.setdefault(event.request_id, clock.now_s)
    return first_s


def test_medhas_example():
    """A long prefill of 10 s, due after 16; short ones of 0.5 s, due after 1 s, come from 5 s on."""
    long = request(0, 10_000, ttft_slo_s=16)
    shorts = [request(1 + index, 500, arrival_s=5 + 2 * index, ttft_slo_s=1) for index in range(5)]
    found = {policy: served([long, *shorts], policy=policy, chunk_tokens=20) for policy in POLICIES}
    late = {
        policy: [one.id for one in [long, *shorts] if first_s[one.id] > one.arrival_s + one.service.ttft_slo_s + 1e-3]
        for policy, first_s in found.items()
    }
    # The shorts that come while the long one runs wait for it; and those that come after it for them.
    assert late["fcfs"] == [1, 2, 3]
    assert late["lars"] == late["edf"] == late["srpt"] == []
    # The long one has 6 s to spare, and gives way at once.
    assert found["edf"][1] == found["srpt"][1] == found["lars"][1] == pytest.approx(5.5, abs=0.05)


@pytest.mark.parametrize(("short_slo_s", "long_s", "short_s"), [(6, 10.0, 10.5), (1, 10.5, 5.5)])
def test_lars_makes_no_prompt_late_for_one_that_can_wait(short_slo_s, long_s, short_s):
    """A long prompt of 10 s has 0.4 to spare, and a short one takes 0.5: if that can wait, both are in time."""
    prompts = [request(0, 10_000, ttft_slo_s=10.4), request(1, 500, arrival_s=5, ttft_slo_s=short_slo_s)]
    first_s = served(prompts, policy="lars", chunk_tokens=20)
    assert [first_s[0], first_s[1]] == pytest.approx([long_s, short_s], abs=0.03)


@pytest.mark.parametrize("ttft_slo_s", [100, 4, 1])
@pytest.mark.parametrize("arrivals_s", [[0.0] * 8, [0.0, 0.3, 0.35, 0.4, 0.5, 0.8, 0.81, 0.82]])
def test_lars_finishes_equal_prompts_one_by_one(ttft_slo_s, arrivals_s):
    """Whether all are in time, some, or none: the k-th has its token after k prefills of 0.5 s."""
    prompts = [request(id, 500, arrival_s, ttft_slo_s=ttft_slo_s) for id, arrival_s in enumerate(arrivals_s)]
    first_s = served(prompts, policy="lars", chunk_tokens=50)
    assert [first_s[id] for id in range(8)] == pytest.approx([0.5 * (1 + id) for id in range(8)], abs=0.02)


@pytest.mark.parametrize("slower", [0.5, 3, 6])
def test_equal_prompts_end_one_by_one_on_a_machine_that_is_not_as_predicted(slower):
    prompts = [request(id, 500, ttft_slo_s=1) for id in range(8)]
    first_s = served(prompts, slower, policy="lars", chunk_tokens=50)
    assert [first_s[id] for id in range(8)] == pytest.approx([0.5 * slower * (1 + id) for id in range(8)], rel=0.05)


def test_lars_lets_no_late_long_prompt_wait_for_ever():
    """Shorts that take all of the machine's time, each late soon after it came: the long one goes on among them."""
    long = request(0, 2_000, ttft_slo_s=2)
    shorts = [request(1 + index, 500, arrival_s=0.5 * index, ttft_slo_s=0.6) for index in range(60)]
    first_s = served([long, *shorts], policy="lars", chunk_tokens=20)
    assert 2 < first_s[0] < 2 + 2 * 5


@pytest.mark.parametrize("step_tokens", [20, 150, 300])
def test_lars_knows_that_a_step_takes_its_time(step_tokens):
    """A short prompt beside a long one that cannot wait does so until its own deadline, and not until a step later."""
    long = request(0, 20_000, ttft_slo_s=20.005)
    shorts = [request(1 + index, 10, arrival_s=0.37 * index, ttft_slo_s=1) for index in range(50)]
    first_s = served([long, *shorts], policy="lars", chunk_tokens=step_tokens)
    waits_s = [first_s[one.id] - one.arrival_s for one in shorts]
    assert 0.35 < max(waits_s) <= 1


def test_under_load_lars_shares_the_lateness_where_edf_makes_a_convoy():
    """Nearly as many shorts as the machine can compute beside a long one: it is late whatever is done. Once it is,
    edf lets all that come wait for it."""
    long = request(0, 10_000, ttft_slo_s=16)
    shorts = [request(1 + index, 500, arrival_s=0.55 * index, ttft_slo_s=1) for index in range(60)]
    found = {policy: served([long, *shorts], policy=policy) for policy in POLICIES}
    wait_s = {policy: max(first_s[one.id] - one.arrival_s for one in shorts) for policy, first_s in found.items()}
    assert wait_s["fcfs"] > wait_s["edf"] > 9
    assert wait_s["srpt"] < wait_s["lars"] < 2.5
    assert found["edf"][0] < found["lars"][0] <= 10 + 60 * 0.5 + 0.1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_of_equals_goes_first(policy):
    first_s = served([request(index, 100) for index in range(5)], policy=policy)
    assert sorted(first_s, key=first_s.get) == list(range(5))


def test_a_higher_priority_goes_first_under_every_policy():
    for policy in POLICIES:
        first_s = served([request(0, 300), request(1, 300, priority=-1), request(2, 300, priority=1)], policy=policy)
        assert sorted(first_s, key=first_s.get) == [2, 0, 1]


def test_a_request_without_a_deadline_is_due_after_twice_its_prefill_or_a_second():
    scheduler = Scheduler(config(policy="lars"), ByRow())
    for asked, due_s in (
        (request(0, 100, 3.0), 4.0),
        (request(1, 5000, 3.0), 13.0),
        (request(2, 50, 3.0, ttft_slo_s=9), 12.0),
    ):
        assert scheduler._job(asked).deadline_s == pytest.approx(due_s, rel=1e-4)
    scaled = Scheduler(config(policy="lars", slo_scale=4.0), ByRow())
    assert scaled._job(request(0, 5000)).deadline_s == pytest.approx(20, rel=1e-4)


@st.composite
def floods(draw):
    """A request among others that never stop coming, as much work as the machine can do."""
    tokens, gap = draw(st.integers(1, 400)), draw(st.floats(1.0, 1.5))
    return draw(st.integers(1, 3000)), tokens, tokens * TOKEN_S * gap + 1e-3, draw(st.sampled_from(["", "other"]))


@settings(max_examples=settings.default.max_examples // 5)  # each of which is long
@given(
    flood=floods(), policy=st.sampled_from(POLICIES), adaptive=st.booleans(), max_running=st.sampled_from([1, 3, 1000])
)
def test_no_request_waits_forever(flood, policy, adaptive, max_running):
    """Whatever comes after it, it has its first token once the others have had ten times its deadline."""
    tokens, other_tokens, gap_s, client = flood
    one = request(0, tokens, arrival_s=0.001)
    due_s = max(1.0, 2 * tokens * TOKEN_S)
    count = int(30 * due_s / gap_s) + 1
    others = [
        request(1 + index, other_tokens, arrival_s=index * gap_s, client=client) for index in range(min(count, 3000))
    ]
    first_s = served([one, *others], policy=policy, adaptive=adaptive, max_running=max_running)
    assert len(first_s) == 1 + len(others)
    if count <= 3000:
        assert first_s[0] < 25 * due_s


def test_clients_share_the_prefill_and_none_decides_anothers_wait():
    """One client's long prompts beside another's short ones: by deadline alone these would wait behind them."""
    long = [request(index, 20_000, client="long", ttft_slo_s=0.5) for index in range(3)]
    short = [request(10 + index, 100, arrival_s=1.0 + index, client="short", ttft_slo_s=60) for index in range(20)]
    apart = served([*long, *short], policy="edf")
    waits_s = [apart[one.id] - one.arrival_s for one in short]
    assert max(waits_s) < 0.45
    as_one = [request(index, 20_000, ttft_slo_s=0.5) for index in range(3)]
    together = served([*as_one, *(request(one.id, 100, one.arrival_s, ttft_slo_s=60) for one in short)], policy="edf")
    assert max(together[one.id] - one.arrival_s for one in short) > 30


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_clients_that_compete_have_their_weights_of_the_prefill(weight):
    prompts = [request(index, 500, client="ab"[index % 2]) for index in range(80)]
    first_s = served(prompts, policy="fcfs", client_weights={"a": weight})
    half_s = 20.0  # when half of all is computed
    a, b = (sum(first_s[one.id] <= half_s for one in prompts if one.service.client == client) for client in "ab")
    assert a / b == pytest.approx(weight, rel=0.15)


def test_who_comes_back_has_saved_no_share():
    a = [request(index, 500, client="a") for index in range(40)]
    b = [request(100 + index, 500, arrival_s=15.0, client="b") for index in range(40)]
    first_s = served([*a, *b])
    done = [sum(first_s[one.id] <= 25.0 for one in one_client) for one_client in (a, b)]
    assert done[1] == pytest.approx(10, abs=1)  # half of what was computed since it came


def test_a_prompt_that_its_priority_holds_up_saves_no_share_and_changes_no_others():
    a = [request(index, 500, client="a") for index in range(40)]
    b = [request(100 + index, 500, arrival_s=10.0, client="b") for index in range(40)]
    parked = request(200, 500, client="c", priority=-1)
    first_s = served([*a, *b, parked])
    done = [sum(10.5 < first_s[one.id] <= 20.0 for one in one_client) for one_client in (a, b)]
    assert abs(done[0] - done[1]) <= 1
    assert first_s[200] == max(first_s.values())


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'random' is not known: use one of fcfs, edf, srpt, lars"):
        make_policy("random")
    with pytest.raises(UserError, match="use one of fcfs, edf, srpt, lars"):
        config(policy="random")


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "1", True])
def test_an_slo_that_is_no_time_is_refused(wrong):
    for name in ("ttft_slo_s", "tbt_slo_s"):
        with pytest.raises(UserError, match="set it to a number of seconds above 0"):
            ServiceLevel(**{name: wrong})


@pytest.mark.parametrize(
    ("setting", "wrong"), [("slo_scale", 0), ("tbt_target_s", 0), ("client_weights", {"a": 0}), ("prefix_cache", 1)]
)
def test_settings_out_of_range_are_refused(setting, wrong):
    with pytest.raises(UserError, match="set it to"):
        config(**{setting: wrong})


class WholeStep:
    """A step with decodes takes `decodes_s`, each row of a prompt a hundredth of a millisecond."""

    def __init__(self, decodes_s):
        self.decodes_s = decodes_s

    def seconds(self, work):
        return (self.decodes_s if work.decode_rows else 0) + 1e-5 * work.chunk_rows


def rows_beside_a_decode(decodes_s, tbt_slo_s, **settings):
    """The tokens of a prompt in the first step that has one beside the row of a request with that target."""
    clock = Clock(WholeStep(decodes_s))
    loop = Loop(Scheduler(config(adaptive=True, chunk_tokens=8192, **settings), clock.cost), clock, lambda: clock.now_s)
    loop.add(request(0, 4, new_tokens=1000, tbt_slo_s=tbt_slo_s))
    loop.step()
    loop.add(request(1, 50_000))
    loop.step()
    _, step = clock.steps[-1]
    assert (step.work.decode_rows, len(step.chunks)) == (1, 1)
    return step.chunks[0].num_tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("decodes_s", "least_s"), [(0.01, 0.02), (1e-5, 1e-3)])
def test_a_target_that_no_step_can_keep_leaves_prompts_their_time(policy, decodes_s, least_s):
    """At least what decodes take alone, and what is left of a millisecond beside shorter ones."""
    found = rows_beside_a_decode(decodes_s, 1e-9, policy=policy)
    assert found == rows_beside_a_decode(decodes_s, least_s, policy=policy)
    assert 16 < found < rows_beside_a_decode(decodes_s, 2 * least_s, policy=policy)


def test_the_engines_own_target_has_no_floor():
    assert rows_beside_a_decode(0.01, None, tbt_target_s=1e-9) == 4


@pytest.mark.parametrize("ttft_slo_s", [None, 1, 4])
def test_short_prompts_that_come_beside_equal_ones_do_not_make_them_take_turns(ttft_slo_s):
    """Eight of 0.5 s at once, and one of 10 ms every 0.37 s, which can wait. First come, first served, the eight wait
    2.25 s and what shorts take; in turns, more than 4."""
    prompts = [request(id, 500, ttft_slo_s=ttft_slo_s) for id in range(8)]
    shorts = [request(8 + index, 10, arrival_s=0.37 * index) for index in range(12)]
    first_s = served([*prompts, *shorts], policy="lars", chunk_tokens=50)
    assert sum(first_s[id] for id in range(8)) / 8 < 2.6
    assert max(first_s[one.id] - one.arrival_s for one in shorts) < 1.1


def test_equal_prompts_of_each_rank_end_one_by_one():
    """Whole requests on each of two KVP ranks, which compute chunks of 50 tokens side by side."""
    prompts = [request(id, 500, ttft_slo_s=1) for id in range(16)]
    first_s = {
        policy: served(prompts, policy=policy, chunk_tokens=100, kvp=2, placement="local")
        for policy in ("fcfs", "lars")
    }
    assert sum(first_s["lars"].values()) == pytest.approx(sum(first_s["fcfs"].values()), rel=0.01)


class BesideDecodes(ByRow):
    """Each step with decodes takes 20 ms more."""

    def seconds(self, work):
        return super().seconds(work) + (0.02 if work.decode_rows else 0)


@pytest.mark.parametrize(("long_slo_s", "other_tokens"), [(40, 9000), (30, 5000), (26, 1000)])
def test_a_prompt_yields_by_what_prefills_take_beside_decodes(long_slo_s, other_tokens):
    """10 s alone take longer in steps of 50 ms with decodes, and both are in time if the long one goes first."""
    decode = request(0, 10, new_tokens=90_000, ttft_slo_s=1)
    long = request(1, 10_000, arrival_s=0.1, ttft_slo_s=long_slo_s)
    other = request(2, other_tokens, arrival_s=0.1 if long_slo_s > 26 else 1.0, ttft_slo_s=200)
    clock, first_s = Clock(BesideDecodes()), {}
    scheduler = Scheduler(config(policy="lars", adaptive=True, chunk_tokens=8192, tbt_target_s=0.05), clock.cost)
    loop, left = Loop(scheduler, clock, lambda: clock.now_s), [decode, long, other]
    while len(first_s) < 3:
        while left and left[0].arrival_s <= clock.now_s:
            loop.add(left.pop(0))
        stepped = loop.step()
        for event in () if stepped is None else stepped[1]:
            first_s.setdefault(event.request_id, clock.now_s)
    assert all(first_s[one.id] <= one.arrival_s + one.service.ttft_slo_s for one in (long, other))


class MostTokensFirst(Policy):
    """The longest prompt runs first, and is preempted first."""

    def sort_key(self, job, left_s, now_s):
        return -len(job.request.prompt_token_ids)

    def preemption_key(self, job, lost_s, now_s):
        return -lost_s


@pytest.mark.parametrize(("policy", "preempted"), [(MostTokensFirst(), 0), (Policy(), 1)])
def test_a_policy_chooses_who_is_preempted(policy, preempted):
    """Of two requests that outgrow a pool the one with more tokens, or by default the one with less to lose."""
    asked = [Request(id, array("i", [id] * tokens), SamplingParams(max_new_tokens=30), frozenset(), 0, 0.0)
             for id, tokens in enumerate((40, 20))]  # fmt: skip
    settings = scheduler_config(kvp=1, num_blocks=20, max_model_len=80, block_tokens=4)
    engine = Engine(settings)
    engine.scheduler._order.policy = policy
    engine.add(*asked)
    engine.drain()
    again = {new.id for step in engine.runner.steps for new in step.changes.new if step.id > 1}
    assert again == {preempted}
    assert [engine.outcomes[one.id].token_ids for one in asked] == list(map(expected_output, asked))


@pytest.mark.parametrize("name", ["sort_key", "headroom_s", "preemption_key"])
@pytest.mark.parametrize("wrong", [float("nan"), None, "1"])
def test_what_a_policy_returns_is_a_number(name, wrong):
    policy = type("Wrong", (Policy,), {name: lambda self, *arguments: wrong})()
    order = Order(policy, Shares({}), PrefillTimes(None, 1))
    engine = Engine(engine_config())
    engine.add(engine_request(0, 40))
    engine.step()
    (seq,) = engine.scheduler.running
    asked = {
        "sort_key": lambda: order.waiting(seq.job, 0.0),
        "headroom_s": lambda: order.headroom_s(seq, 0.0, 1.0),
        "preemption_key": lambda: order.preemption(seq, 1.0, 0.0),
    }
    with pytest.raises(UserError, match=f"the policy's {name} returned {wrong!r}: return a number that is not NaN"):
        asked[name]()


def test_a_policy_may_return_numbers_of_any_kind_and_what_it_refuses_is_not_queued():
    class Picky(Policy):
        def sort_key(self, job, left_s, now_s):
            return {"": np.float32(1), "a": Fraction(1, 3)}[job.request.service.client]

    engine = Engine(engine_config())
    engine.scheduler._order.policy, engine.runner.in_turn = Picky(), False
    stranger = replace(engine_request(2, 5), service=ServiceLevel(client="b"))
    engine.add(engine_request(0, 5), replace(engine_request(1, 5), service=ServiceLevel(client="a")))
    with pytest.raises(KeyError):
        engine.add(stranger)
    assert engine.scheduler.num_waiting == 2
    while engine.loop.has_work:
        engine.step()
    assert {id for id, outcome in engine.outcomes.items() if outcome.finish_reason} == {0, 1}
