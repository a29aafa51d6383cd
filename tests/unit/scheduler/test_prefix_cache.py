"""What has run is found by requests that begin alike, where it lies, until others need the room."""

import hashlib
import struct
from dataclasses import replace

import pytest
from test_pressure import LONG, Pressed, check_blocks, config, request
from test_scheduler import expected_output

from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.prefix import PrefixCache

pytestmark = pytest.mark.unit


def ran(engine, *asked):
    """Run to the ends, without looking whether anything is left."""
    engine.add(*asked)
    while engine.loop.has_work:
        engine.step()
        check_blocks(engine.scheduler)
    for one in asked:
        assert engine.outcomes[one.id].token_ids == expected_output(one)
    return [engine.usages[one.id].cached_tokens for one in asked]


@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
@pytest.mark.parametrize("kvp", [1, 2, 3])
def test_a_second_question_about_a_document_finds_it_where_it_lies(placement, kvp):
    more = {"placement": placement, "growth_limit_tokens": 8, "kvp_threshold_tokens": 40, "kvp": kvp, "num_blocks": 60}
    engine = Pressed(config(**more))
    assert ran(engine, request(0, [*LONG[:40], 1, 2], 5)) == [0]
    blocks = dict(engine.scheduler.pool.index)
    assert ran(engine, request(1, [*LONG[:40], 3, 4, 5], 5)) == [40]
    new = engine.runner.new[1]
    assert set(new.kv.cached_blocks) <= set(blocks.values())
    assert [engine.scheduler.pool.allocators[block.owner].is_cached(block.id) for block in new.kv.cached_blocks] == [
        True
    ] * 10


def test_an_answer_is_found_by_the_next_turn_of_its_conversation():
    engine = Pressed(config(num_blocks=60), depth=2)
    first = request(0, LONG[:10], 13)
    ran(engine, first)
    turn = [*LONG[:10], *expected_output(first), 7, 7, 7]
    # The last token of the answer has no KV: of 22 with KV, 20 fill blocks.
    assert ran(engine, request(1, turn, 5)) == [20]


def test_the_whole_prompt_again_leaves_one_token_to_compute():
    engine = Pressed(config(num_blocks=60))
    assert ran(engine, request(0, LONG[:32], 5)) == [0]
    assert ran(engine, request(1, LONG[:32], 5)) == [31]
    assert [(chunk.id, chunk.num_tokens) for step in engine.runner.steps for chunk in step.chunks if chunk.id == 1] == [
        (1, 1)
    ]


def test_requests_that_diverge_inside_a_block_share_the_blocks_before_it():
    engine = Pressed(config(num_blocks=60))
    ran(engine, request(0, LONG[:30], 5))
    assert ran(engine, request(1, [*LONG[:18], 1, 2, 3], 5)) == [16]


def test_another_salt_or_another_root_finds_nothing():
    engine = Pressed(config(num_blocks=60))
    ran(engine, request(0, LONG[:30], 5, cache_salt="a"))
    assert ran(
        engine,
        request(1, LONG[:30], 5, cache_salt="b"),
    ) == [0]
    assert ran(engine, request(2, LONG[:30], 5)) == [0]
    assert ran(engine, request(3, LONG[:30], 5, cache_salt="a")) == [28]


def test_hashes_are_a_chain_of_sha256():
    engine = Pressed(config(num_blocks=60))
    ran(engine, request(0, LONG[:9], 1, cache_salt="salt"))
    root = hashlib.sha256(b"root" + hashlib.sha256(b"").digest() + hashlib.sha256(b"salt").digest()).digest()
    first = hashlib.sha256(root + struct.pack("4i", *LONG[:4])).digest()
    second = hashlib.sha256(first + struct.pack("4i", *LONG[4:8])).digest()
    assert set(engine.scheduler.pool.index) == {first, second}


def test_what_is_needed_takes_the_place_of_what_was_used_the_longest_ago():
    engine = Pressed(config(kvp=1, num_blocks=12))
    ran(engine, request(0, LONG[:17], 1))
    ran(engine, request(1, LONG[50:67], 1))
    assert ran(engine, request(2, LONG[:18], 1)) == [16]  # used again
    ran(engine, request(3, LONG[20:45], 1))  # 7 blocks: 4 are free
    assert ran(engine, request(4, LONG[50:67], 1)) == [4]  # of whose four blocks the last three went
    # Which took four blocks: one was free, and three were the last of the first prompt's.
    assert ran(engine, request(5, LONG[:17], 1)) == [4]


def test_blocks_in_use_are_never_taken_for_others():
    engine = Pressed(config(kvp=1, num_blocks=14))
    ran(engine, request(0, LONG[:25], 1))
    holder = request(1, [*LONG[:24], 1], 30)
    engine.add(holder)
    engine.step()
    for id in range(2, 12):
        engine.add(request(id, [id] * 9, 4))
    outcomes = engine.drain()
    assert engine.usages[1].cached_tokens == 24
    assert outcomes[1].token_ids == expected_output(holder)


def test_without_it_nothing_is_kept():
    engine = Pressed(config(prefix_cache=False))
    ran(engine, request(0, LONG[:30], 5))
    assert not engine.scheduler.pool.index
    assert ran(engine, request(1, LONG[:30], 5)) == [0]


def test_where_bits_may_not_depend_on_it_only_blocks_on_their_own_ranks_are_used():
    more = {"kvp": 2, "num_blocks": 60, "placement": "auto", "kvp_threshold_tokens": 40, "batch_invariant": True}
    engine = Pressed(config(**more))
    short, long = request(0, LONG[:24], 8), request(1, LONG[:60], 8)
    ran(engine, short)
    assert ran(engine, long) == [0]
    assert ran(engine, replace(long, id=2)) == [59]


def test_the_prefix_of_a_request_that_does_not_fit_is_looked_for_only_when_that_may_have_changed(monkeypatch):
    """It waits while another decodes: to look through a long prefix in each of its steps would take long."""
    engine = Pressed(config(kvp=1, num_blocks=20))
    engine.add(request(0, LONG[:24], 40))
    engine.step()
    looked, find = [], PrefixCache.find
    monkeypatch.setattr(PrefixCache, "find", lambda cache, asked: looked.append(asked.id) or find(cache, asked))
    engine.add(request(1, LONG[:20] + LONG[50:90], 4))
    for _ in range(30):
        engine.step()
    assert looked == [1]
    engine.drain()
    assert len(looked) < 5
    assert engine.usages[1].cached_tokens == 20
