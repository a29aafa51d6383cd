"""What waiting requests find in the prefix cache is kept up to date, and not looked for again."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from test_pressure import LONG, Pressed, Traffic, config, request
from test_scheduler import expected_output

from longhelix.scheduler.admission import Admission
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.prefix import PrefixCache

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("overtakes", [False, True])
def test_waiting_with_a_long_cached_prefix_takes_no_look_at_its_blocks(monkeypatch, overtakes):
    """A long prompt beside them gives them a reason to try again in each step, and short requests that come and go,
    some of which share the first blocks with them, give them room that is not enough."""
    settings = config(
        kvp=1, num_blocks=1400, max_model_len=5600, chunk_tokens=8, policy="lars" if overtakes else "fcfs"
    )
    engine = Pressed(settings)
    document = [index % 50 for index in range(2000)]
    engine.add(request(0, document, 1))
    while engine.loop.has_work:
        engine.step()
    engine.add(request(1, [1, 2, 3] * 1000, 5))
    engine.step()
    for id in range(2, 34):
        engine.add(request(id, [*document, *[id] * 1000], 5, priority=int(not overtakes)))
    for _ in range(12):
        engine.step()  # all have been tried
    looked, find, visits = [], PrefixCache.find, engine.scheduler.pool.matches.num_visits
    monkeypatch.setattr(PrefixCache, "find", lambda cache, asked: looked.append(asked.id) or find(cache, asked))
    for id in range(100, 130):
        engine.add(request(id, [*document[:8], id], 3, priority=2))
        for _ in range(6):
            engine.step()
    assert len(engine.scheduler._waiting) == 32
    assert set(looked) == set(range(100, 130))
    assert engine.scheduler.pool.matches.num_visits - visits < 500


def test_a_prompt_that_leaves_a_long_one_early_takes_no_look_at_the_rest_of_it():
    """It waits as well, and gives up: the others begin with the same few blocks."""
    engine = Pressed(config(kvp=1, num_blocks=1400, max_model_len=5600, policy="lars"))
    document = [index % 50 for index in range(2000)]
    engine.add(request(0, document, 1))
    while engine.loop.has_work:
        engine.step()
    engine.add(request(1, [1, 2, 3] * 1000, 60))
    engine.step()
    engine.add(request(2, [*document, *[2] * 2500], 5))
    for _ in range(8):
        engine.step()
    visits = engine.scheduler.pool.matches.num_visits
    for id in range(100, 105):
        engine.add(request(id, [*document[:40], *[id] * 3000], 3))
        for _ in range(8):  # until a block of the first one's answer is full
            engine.step()
        engine.abort(id)
    assert len(engine.scheduler._waiting) == 1
    assert 0 < engine.scheduler.pool.matches.num_visits - visits < 500


def test_a_request_begins_when_an_answer_has_the_blocks_that_it_has_no_room_for():
    """Its prompt has the other's answer so far, and fills rank 0 but for a block that the other one has there."""
    engine = Pressed(config())
    first = request(0, LONG[:8], 8)
    engine.add(first)
    for _ in range(3):
        engine.step()
    engine.add(request(1, [*LONG[:8], *expected_output(first)[:4], *LONG[:78]], 1))
    while len(engine.outcomes[0].token_ids) < 5:
        engine.step()
        assert 1 not in engine.runner.new
    engine.step()
    assert 1 in engine.runner.new
    assert engine.runner.new[1].kv.cached_tokens == 12
    engine.drain()


def test_a_request_begins_elsewhere_when_its_prefix_is_gone():
    """It waited for room on the rank that had the prefix, whose blocks an answer has needed since."""
    engine = Pressed(config(placement="local", max_model_len=48))
    engine.add(request(0, LONG[:8], 1))
    while engine.loop.has_work:
        engine.step()
    engine.add(request(1, LONG[50:86], 12))
    engine.step()
    engine.add(request(2, LONG[:30], 1))
    while engine.scheduler.pool.index.keys() & engine.scheduler.hashes(request(-1, LONG[:8], 1)):
        engine.step()
        assert 2 not in engine.runner.new
    engine.step()
    assert 2 in engine.runner.new
    assert engine.outcomes[1].finish_reason is None
    engine.drain()


def has_room(admission, job, alone):
    """Admission as it is without matches: it looks at every block."""
    block_tokens = admission._config.block_tokens
    placement, prefix = admission._placed(job)
    for _ in range(2):
        full = [block for block in prefix.full_blocks(block_tokens) if isinstance(block, Block)]
        shared = Counter(block.owner for block in full)
        room, promised = admission._room(job, placement, shared)
        if admission._pool.fits(room, promised, admission._pool.unheld(prefix.kept), alone=alone):
            return True
        prefix = admission._whole(prefix, job.request)
        placement = admission._placement_behind(prefix, job.request)
    return False


def blocks_of(match):
    blocks, run = [], match.run
    while run is not None:
        blocks, run = run.blocks + blocks, run.before
    return blocks


def check(admission, job, alone, may_fit):
    cache, block_tokens = admission._cache, admission._config.block_tokens
    most_tokens = admission._most_cached_tokens(job)
    match = cache._match_of[job.request.id]
    found = cache.find(job.request).cut(most_tokens, block_tokens)
    assert blocks_of(match) == list(found.blocks)
    owners, kept, unheld = match.counts()
    assert owners == Counter(block.owner for block in found.blocks)
    assert +kept == Counter(block.owner for block in found.kept)
    assert +unheld == admission._pool.unheld(found.kept)
    fits = has_room(admission, job, alone)
    assert may_fit == fits or (may_fit and admission._config.placement.batch_invariant)


class Compared(Traffic):
    """Each time that a request waits on, because of numbers, is compared with a look at all of its blocks."""

    more_blocks = st.integers(0, 4)
    compared = 0

    @staticmethod
    def begin_comparing():
        may_fit = Admission._may_fit

        def compared(admission, job, *, alone):
            answer = may_fit(admission, job, alone=alone)
            check(admission, job, alone, answer)
            Compared.compared += 1
            return answer

        return may_fit, compared

    def __init__(self):
        super().__init__()
        self.may_fit, Admission._may_fit = self.begin_comparing()

    def teardown(self):
        try:
            super().teardown()
            if hasattr(self, "engine"):
                matches = self.engine.scheduler.pool.matches
                assert not matches._root.after
                assert not any(matches._run_of_block)
                assert not any(matches._run_of_slot)
        finally:
            Admission._may_fit = self.may_fit


TestCompared = Compared.TestCase
TestCompared.settings = settings(stateful_step_count=25)
