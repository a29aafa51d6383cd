"""A long cached prompt is hashed a part at a time, so that the steps of others do not wait for all of it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefix import BLOCK_TOKENS, LONG, config, request
from test_scheduler import Engine, expected_output

from longhelix.scheduler import admission, chain
from longhelix.scheduler.chain import Chain
from longhelix.scheduler.request import ImageSpan

pytestmark = pytest.mark.unit


@pytest.fixture
def hashed(monkeypatch):
    """How many blocks each step has hashed: at most 4, or 2 more of each waiting prompt."""
    monkeypatch.setattr(chain, "_HASHED_AT_ONCE", 2)
    monkeypatch.setattr(admission, "_HASHED_A_STEP", 4)
    monkeypatch.setattr(admission, "_HASHED_OF_EACH", 2)
    counts, block_hashes = [0], chain.block_hashes

    def counted(before, token_bytes, num_blocks, *rest):
        counts[-1] += num_blocks
        return block_hashes(before, token_bytes, num_blocks, *rest)

    monkeypatch.setattr(chain, "block_hashes", counted)
    return counts


def engine_with(hashed, *prompts):
    """Has computed these prompts, and runs a request that goes on for long."""
    engine = Engine(config(prefix_cache=True, max_running=8, policy="lars"))
    for tokens in prompts:
        engine.add(request(-1 - len(engine.outcomes), tokens, 1))
        engine.drain()
    engine.add(request(0, [1, 2, 3], 50))
    engine.step()
    return engine


def until_it_begins(engine, hashed, id):
    """How many steps that takes, and the most that one of them has hashed."""
    hashed[:] = []
    while not engine.scheduler.has_begun(id):
        hashed.append(0)
        engine.step()
    return len(hashed), max(hashed)


def test_a_long_cached_prompt_begins_with_all_that_is_cached_after_some_steps(hashed):
    engine = engine_with(hashed, LONG)
    asked = request(1, [*LONG, 5, 6], 4)
    engine.add(asked)
    steps, most = until_it_begins(engine, hashed, 1)
    assert steps == 7  # of 25 blocks
    assert most <= 4 + 1  # the request that runs fills blocks as well
    (new,) = engine.runner.steps[-1].changes.new
    assert new.kv.cached_tokens == len(LONG) // BLOCK_TOKENS * BLOCK_TOKENS
    assert engine.drain()[1].token_ids == expected_output(asked)


def test_a_request_that_runs_alone_begins_at_once(hashed):
    engine = engine_with(hashed, LONG)
    engine.drain()
    engine.add(request(1, LONG, 4))
    assert until_it_begins(engine, hashed, 1)[0] == 1


def test_what_is_not_cached_is_not_hashed(hashed):
    engine = engine_with(hashed, LONG)
    cache, other = engine.scheduler._cache, LONG[::-1]
    assert cache.hash_ahead(request(1, other), 100) == (2, True)
    half = [*LONG[:40], *other]
    assert cache.hash_ahead(request(2, half), 100) == (12, True)
    engine.add(request(1, other, 4))
    assert until_it_begins(engine, hashed, 1)[0] == 1


def test_short_prompts_do_not_wait_for_long_ones(hashed):
    engine = engine_with(hashed, LONG, LONG[::-1])
    engine.add(request(1, [*LONG, 5], 4), request(2, [*LONG[::-1], 5], 4), request(3, [7, 8], 4))
    assert until_it_begins(engine, hashed, 3)[0] == 1
    assert not engine.scheduler.has_begun(1)
    steps, most = until_it_begins(engine, hashed, 2)
    assert steps < 25
    assert most <= 4 + 2 + 1


def test_hashes_that_are_known_are_not_computed_again(hashed):
    engine = engine_with(hashed, LONG)
    asked = request(1, [*LONG, 5, 6], 4)
    known = engine.scheduler.hashes(request(-1, LONG, 1))
    assert len(known) == len(LONG) // BLOCK_TOKENS
    hashed[:] = [0]
    engine.scheduler.add(asked, known)
    engine.scheduler.schedule(0.0)
    assert engine.scheduler.has_begun(1)
    assert hashed == [0]


def test_a_document_is_hashed_once_for_all_questions_about_it(hashed):
    engine = engine_with(hashed, LONG)
    engine.add(request(1, [1, 2, 3] * 40, 5))  # so that there is no room for the questions
    engine.step()
    engine.add(*(request(id, [*LONG, *[id] * 200], 3) for id in range(2, 6)))
    hashed[:] = [0]
    while engine.scheduler.num_waiting and len(hashed) < 20:
        engine.step()
    assert sum(hashed) < 2 * (len(LONG) // BLOCK_TOKENS)


@given(same=st.integers(0, 60), ahead=st.integers(0, 20), behind=st.integers(0, 20), salt=st.sampled_from(["", "a"]))
def test_hashes_that_are_copied_are_those_of_the_tokens(same, ahead, behind, salt):
    first = request(1, LONG[:70], 1)
    second = request(2, [*LONG[:same], 49, *LONG[20:]], 1)
    chains = [Chain(root, asked, BLOCK_TOKENS) for root, asked in ((b"", first), (salt.encode(), second))]
    for one, count in zip(chains, (ahead, behind), strict=True):
        while one.num_hashed < min(count, one.num_blocks):
            one[one.num_hashed]
    before = chains[1].num_hashed
    if chains[1].is_behind(chains[0]):
        assert not salt
        chains[1].copy(chains[0])
        assert chains[1].num_hashed == max(before, min(same // BLOCK_TOKENS, chains[0].num_hashed))
    assert chains[1].all() == Chain(salt.encode(), second, BLOCK_TOKENS).all()


def test_hashes_of_prompts_with_images_are_not_copied():
    """The same tokens may stand for other images."""
    shown = [replace(request(1, LONG, 1), images=(ImageSpan(3, 1, 2, mark * 32),)) for mark in (b"a", b"b")]
    first, second = (Chain(b"", asked, BLOCK_TOKENS) for asked in shown)
    first.all()
    second.copy(first)
    assert not second.num_hashed


def test_long_prompts_whose_hashes_are_known_begin_one_in_each_step(hashed, monkeypatch):
    monkeypatch.setattr(admission, "_LOOKED_AT_A_STEP", 4)
    prompts = [LONG, LONG[::-1], LONG[1:]]
    engine = engine_with(hashed, *prompts)
    for id, tokens in enumerate([*prompts, [7, 8]], 1):
        engine.add(request(id, [*tokens, id], 3))
        engine.scheduler._cache.know(request(id, [*tokens, id], 3), engine.scheduler.hashes(request(-1, tokens, 1)))
    assert [step_begins(engine) for _ in range(3)] == [[1, 4], [2], [3]]


def step_begins(engine):
    """The requests that begin in the next step."""
    engine.step()
    return [new.id for new in engine.runner.steps[-1].changes.new]


def test_prompts_that_share_a_first_block_are_looked_up_one_in_each_step(hashed, monkeypatch):
    """Documents behind one system prompt: blocks of one are not found along those of another."""
    monkeypatch.setattr(admission, "_LOOKED_AT_A_STEP", 4)
    documents = [[*LONG[:BLOCK_TOKENS], *[index] * 40] for index in range(4)]
    engine = Engine(config(prefix_cache=True, max_running=8, policy="lars", num_blocks=30))
    for index, tokens in enumerate(documents):
        engine.add(request(-1 - index, tokens, 1))
        engine.drain()
    engine.add(request(0, [1, 2, 3], 50))
    engine.step()
    for id, tokens in enumerate(documents, 1):
        asked = request(id, [*tokens, *[id] * 190], 3)  # there is no room for it
        engine.add(asked)
        engine.scheduler._cache.know(asked, engine.scheduler.hashes(request(-9, tokens, 1)))
    visits = [0]
    for _ in range(10):
        engine.step()
        visits.append(engine.scheduler.pool.matches.num_visits)
    steps = [after - before for before, after in pairwise(visits)]
    assert engine.scheduler.num_waiting == 4
    assert sum(steps) >= 40
    assert max(steps) < 30
