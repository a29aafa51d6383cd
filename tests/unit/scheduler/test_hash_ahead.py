"""A long cached prompt is hashed a part at a time, so that the steps of others do not wait for all of it."""

import pytest
from test_prefix import BLOCK_TOKENS, LONG, config, request
from test_scheduler import Engine, expected_output

from longhelix.scheduler import admission, prefix

pytestmark = pytest.mark.unit


@pytest.fixture
def hashed(monkeypatch):
    """How many blocks each step has hashed: at most 4, or 2 more of each waiting prompt."""
    monkeypatch.setattr(prefix, "_HASHED_AT_ONCE", 2)
    monkeypatch.setattr(admission, "_HASHED_A_STEP", 4)
    monkeypatch.setattr(admission, "_HASHED_OF_EACH", 2)
    counts, chain = [0], prefix._chain

    def counted(before, token_bytes, num_blocks, *rest):
        counts[-1] += num_blocks
        return chain(before, token_bytes, num_blocks, *rest)

    monkeypatch.setattr(prefix, "_chain", counted)
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
    (new,) = engine.runner.steps[-1].new
    assert new.cached_tokens == len(LONG) // BLOCK_TOKENS * BLOCK_TOKENS
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
    known = engine.scheduler.chain(request(-1, LONG, 1))
    assert len(known) == 1 + len(LONG) // BLOCK_TOKENS
    hashed[:] = [0]
    engine.scheduler.add(asked, known)
    engine.scheduler.schedule(0.0)
    assert engine.scheduler.has_begun(1)
    assert hashed == [0]
