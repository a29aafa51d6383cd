"""How many guides ranks compile before a step, in which everybody waits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Engine, config, expected_output, request

from longhelix.scheduler import guide as guide_module
from longhelix.scheduler.compiled_guides import CompiledGuides
from longhelix.scheduler.guide import Guide, KeptGuides
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import InitialKV, NewSequence, SampledToken, StepResult

pytestmark = pytest.mark.unit


def guided(asked, name, guide_s):
    return replace(asked, sampling=replace(asked.sampling, guide=Guide("regex", name)), guide_s=guide_s)


def new(asked):
    return NewSequence(asked.id, asked.sampling, asked.seed, asked.capacity_tokens, InitialKV((1,), True))


def begun(engine):
    """The ids of the requests that each step begins."""
    return [[new.id for new in step.changes.new] for step in engine.runner.steps if step.changes.new]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("guide_s", "expected"),
    [
        (0.43, [[number] for number in range(12)]),
        (0.02, [[number] for number in range(12)]),
        (0.005, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (0.0, [list(range(12))]),
    ],
)
def test_guides_that_ranks_lack_are_compiled_before_different_steps(guide_s, expected, depth):
    """One before each, or such as take 20 ms together."""
    requests = [guided(request(number, 9, 12), f"a{number}", guide_s) for number in range(12)]
    engine = Engine(config(chunk_tokens=1000), depth)
    engine.add(*requests)
    outcomes = engine.drain()
    assert begun(engine) == expected
    assert {id: outcome.token_ids for id, outcome in outcomes.items()} == {
        asked.id: expected_output(asked) for asked in requests
    }


def test_guides_that_ranks_have_hold_nobody_up():
    engine = Engine(config(chunk_tokens=1000))
    engine.add(*[guided(request(number, 9), f"a{number % 3}", 0.43) for number in range(9)])
    engine.drain()
    assert begun(engine) == [[0], [1], [2, 3, 4, 5, 6, 7, 8]]
    engine.add(*[guided(request(number, 9), f"a{number % 3}", 0.43) for number in range(9, 15)])
    engine.drain()
    assert begun(engine)[3:] == [list(range(9, 15))]


def test_one_that_ends_before_ranks_hear_of_it_changes_nothing_of_what_they_keep(monkeypatch):
    monkeypatch.setattr(guide_module, "_MOST_KEPT", 3)
    guides = CompiledGuides(1)
    asked = {name: guided(request(number, 9), name, 0.43) for number, name in enumerate("abcde")}
    for name in "abc":
        guides.begin(asked[name], 0)
        guides.heard([new(asked[name])])
    guides.begin(asked["b"], 0)
    guides.end(asked["b"].id)
    guides.begin(asked["d"], 0)
    guides.heard([new(asked["d"])])  # in place of a
    guides.begin(asked["b"], 0)
    assert guides.may_begin(asked["a"], 0)
    guides.begin(asked["a"], 0)
    assert not guides.may_begin(asked["e"], 0)


def test_those_behind_pass_where_the_policy_lets_them():
    for policy, expected in (("fcfs", [[0], [1], [2, 3]]), ("srpt", [[0, 3], [1], [2]])):
        engine = Engine(config(chunk_tokens=1000, policy=policy))
        engine.runner.in_turn = policy == "fcfs"
        engine.add(*[guided(request(number, 9), f"a{number}", 0.43) for number in range(3)], request(3, 9))
        engine.drain()
        assert begun(engine) == expected


class Rank:
    """The rank that samples of each clock: what it compiles in each of its steps."""

    def __init__(self):
        self.kept = KeptGuides()

    def compiled(self, sequences):
        found = []
        for new in sequences:
            self.kept.want(new.sampling.guide, found.append)
        self.kept.trim()
        return found


@settings(max_examples=150, deadline=None)
@given(data=st.data(), own_clocks=st.booleans(), most_kept=st.integers(1, 6))
def test_what_a_step_has_compiled_takes_little_or_is_one(data, own_clocks, most_kept):
    """By ranks that keep few guides; whatever comes, goes and is known."""
    seconds = [0.43, 0.01, 0.008, 0.002]
    tied = {"own_clocks": True, "placement": "local", "kvp": 3} if own_clocks else {}
    scheduler = Scheduler(config(**tied, max_running=4, policy=data.draw(st.sampled_from(["fcfs", "srpt"]))))
    ranks, in_flight, id = [Rank() for _ in range(3)], [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guide_module, "_MOST_KEPT", most_kept)
        for _ in range(data.draw(st.integers(5, 40))):
            for _ in range(data.draw(st.integers(0, 4))):
                name = data.draw(st.integers(0, 11))
                scheduler.add(guided(request(id, data.draw(st.integers(1, 30)), 3), f"a{name}", seconds[name % 4]))
                id += 1
            busy = {one for step in in_flight for one in step.turn.instances or (0,)}
            step = scheduler.schedule(0.0, busy) if own_clocks or not busy else None
            if step is not None:
                in_flight.append(step)
                for clock, rank in enumerate(ranks):
                    found = rank.compiled([new for new in step.changes.new if (new.instances or (0,))[0] == clock])
                    assert len(found) <= 1 or sum(seconds[int(guide.text[1:]) % 4] for guide in found) <= 0.02
            if in_flight and data.draw(st.booleans()):
                done = in_flight.pop(0)
                sampled = tuple(SampledToken(chunk.id, 1) for chunk in done.chunks if chunk.sample)
                scheduler.complete(StepResult(done.id, sampled, 0))
            if id and data.draw(st.booleans()):
                scheduler.end(data.draw(st.integers(0, id - 1)))


def test_what_ends_unheard_has_nothing_compiled():
    """Neither now, in which others may begin; nor as what ranks have."""
    first, again, other = (guided(request(number, 9), name, 0.43) for number, name in enumerate("aab"))
    guides = CompiledGuides(1)
    guides.begin(first, 0)
    guides.begin(again, 0)
    guides.end(first.id)
    assert not guides.may_begin(other, 0)
    guides.end(again.id)
    assert guides.may_begin(other, 0)
    guides.begin(other, 0)
    assert not guides.may_begin(first, 0)
