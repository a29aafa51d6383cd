"""KV blocks of a prompt that somebody beside the requests holds: to fill them, or to read them."""

from dataclasses import replace

import pytest
from test_prefix import BLOCK_TOKENS, LONG, request
from test_prefix import config as plain_config
from test_scheduler import Engine, expected_output

from longhelix.scheduler.kv.blocks import BlockAllocator
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.request import ServiceLevel

pytestmark = pytest.mark.unit


def config(**more):
    return plain_config(prefix_cache=True, **more)


def available(engine):
    return [allocator.available for allocator in engine.scheduler.pool.allocators]


def cached(engine):
    return sum(allocator.num_cached for allocator in engine.scheduler.pool.allocators)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_request_has_computed_is_held_and_given_back(placement):
    engine = Engine(config(placement=placement, growth_limit_tokens=8))
    engine.add(request(0, LONG[:30], 1))
    engine.step()
    blocks = engine.runner.replicas[0].blocks[:7]
    engine.drain()
    before = available(engine)
    held = engine.pin(request(-1, LONG[:30], 1))
    assert (held.num_cached, list(held.blocks)) == (7, blocks)
    assert sum(before) - sum(available(engine)) == 7
    held.release(engine.scheduler.pool)
    assert available(engine) == before
    assert cached(engine) == 7


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_that_were_filled_from_elsewhere_are_found(placement):
    """Where the prompt would have them, in the order of memory."""
    settings = config(placement=placement, growth_limit_tokens=8)
    engine, begun = Engine(settings), request(-1, LONG[:30], 1)
    held = engine.pin(begun)
    place = settings.place(30, 31, start=0)
    assert [block.owner for block in held.blocks] == [place.owner(index * BLOCK_TOKENS) for index in range(7)]
    for rank in range(2):
        ids = [block.id for block in held.blocks if block.owner == rank]
        assert ids == sorted(ids)
    assert (held.num_cached, cached(engine)) == (0, 0)
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    assert cached(engine) == 7
    again = engine.pin(begun)
    assert (again.num_cached, again.blocks) == (7, held.blocks)
    again.release(engine.scheduler.pool)
    salted = ServiceLevel(cache_salt="other")
    engine.add(request(0, [*LONG[:30], 1, 2], 1), replace(request(1, LONG[:30], 1), service=salted))
    step = engine.scheduler.schedule(0.0)
    assert [(new.kv.cached_tokens, new.kv.cached_blocks) for new in step.changes.new] == [(28, held.blocks), (0, ())]


def test_blocks_that_nobody_has_filled_are_free_again():
    engine = Engine(config())
    before = available(engine)
    held = engine.pin(request(-1, LONG, 1))
    held.release(engine.scheduler.pool)
    assert (available(engine), cached(engine)) == (before, 0)
    assert engine.pin(request(-1, LONG, 1)).num_cached == 0


def test_new_blocks_go_on_behind_those_that_are_there():
    engine = Engine(config(num_blocks=13))
    engine.add(request(0, LONG[:50], 1))
    engine.drain()
    held = engine.pin(request(-1, LONG, 1))
    assert (held.num_cached, len(held.blocks)) == (12, 25)
    assert len(set(held.blocks)) == 25  # none that is held is taken for a new one
    assert [block.owner for block in held.blocks] == [index % 2 for index in range(25)]
    assert sum(available(engine)) == 1
    assert engine.pin(request(-1, [1] * 8, 1)) is None
    assert sum(available(engine)) == 1
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    assert cached(engine) == 25


def test_blocks_that_are_promised_are_not_held():
    """Those that are cached may be needed by a prompt that has begun."""
    engine = Engine(config(num_blocks=13, chunk_tokens=4))
    held = engine.pin(request(-1, LONG[:60], 1))
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    other = request(0, LONG[::-1][:80], 1)
    engine.add(other)
    engine.step()
    assert engine.pin(request(-1, LONG[:60], 1)) is None
    assert engine.drain()[0].token_ids == expected_output(other)


def test_requests_that_need_the_room_have_it():
    """A context that was loaded waits for nobody, and nobody waits for it."""
    engine = Engine(config(num_blocks=14))
    held = engine.pin(request(-1, LONG, 1))
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    other = request(0, LONG[::-1], 4)
    engine.add(other)
    assert engine.drain()[0].token_ids == expected_output(other)
    assert engine.pin(request(-1, LONG, 1)).num_cached < 25


@pytest.mark.parametrize("num_tokens", [40, 80])
def test_a_hold_asks_each_rank_once_however_many_blocks_it_has(monkeypatch, num_tokens):
    """All of it happens between two steps."""
    engine = Engine(config())
    engine.add(request(0, LONG[:num_tokens], 1))
    while engine.loop.has_work:
        engine.step()
    calls, share, release = [], BlockAllocator.share, BlockAllocator.release
    monkeypatch.setattr(BlockAllocator, "share", lambda *of: calls.append("share") or share(*of))
    monkeypatch.setattr(BlockAllocator, "release", lambda *of: calls.append("release") or release(*of))
    held = engine.pin(request(-1, LONG[:num_tokens], 1))
    held.release(engine.scheduler.pool)
    assert held.num_cached == num_tokens // BLOCK_TOKENS
    assert calls == ["share", "share", "release", "release"]


def test_blocks_that_are_refreshed_are_evicted_last():
    """As if they had been held and released. Those that a request holds stay with it."""
    engine = Engine(config(num_blocks=13))
    for tokens in (LONG[:40], LONG[::-1][:40]):
        engine.add(request(len(engine.outcomes), tokens, 1))
        engine.drain()
    pool = engine.scheduler.pool
    assert pool.has_cached(engine.scheduler.hashes(request(-1, LONG[:40], 1)))
    engine.add(request(2, [1, 2, 3] * 10, 1))
    engine.drain()
    assert len(pool.cached(engine.scheduler.hashes(request(-1, LONG[:40], 1)))) == 10
    assert len(pool.cached(engine.scheduler.hashes(request(-1, LONG[::-1][:40], 1)))) < 10
    engine.add(request(3, LONG[:41], 3))
    engine.step()
    assert pool.has_cached(engine.scheduler.hashes(request(-1, LONG[:40], 1)))
    assert engine.drain()[3].token_ids == expected_output(request(3, LONG[:41], 3))
    assert cached(engine) <= 26
