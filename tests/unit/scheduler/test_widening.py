"""Rebalance requests: which blocks move, what is found afterwards, and what is not done."""

from dataclasses import replace

import msgspec
import pytest
from test_pressure import LONG, Pressed, check_blocks, config, request
from test_scheduler import expected_output

from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import StepMeasurements

pytestmark = pytest.mark.unit


def three_ranks(**more):
    return config(**{"kvp": 3, "num_blocks": 17, "placement": "local", "prefix_cache": False} | more)


# Of 24, 26, 27 and 14 tokens; the last one joins the first one on rank 0, where both need 18 blocks in the end.
ASKED = [request(id, LONG[20 * id :][:tokens], 16) for id, tokens in enumerate((24, 26, 27, 14))]


def run(engine, *asked):
    """Every step's widened sequences, with the allocators' books checked after each."""
    engine.add(*asked)
    while engine.loop.has_work:
        engine.step()
        check_blocks(engine.scheduler)
    assert all(engine.outcomes[one.id].token_ids == expected_output(one) for one in asked)
    return [widened for step in engine.runner.steps for widened in step.changes.rebalances]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_largest_request_of_a_full_rank_gives_its_last_full_blocks(depth):
    """Rank 0 has no block left and the others have six and seven, which is four on the average. So two go to each of
    them, the last ones but one in the order of its blocks, and nobody is preempted."""
    engine = Pressed(three_ranks(), depth)
    (widened,) = run(engine, *ASKED)
    assert widened.id == 0
    assert [(move.source.owner, move.target.owner, move.place) for move in widened.moves] == [
        (0, 1, 5), (0, 1, 6), (0, 2, 7), (0, 2, 8),
    ]  # fmt: skip
    assert widened.blocks_per_rank == (6, 2, 2)
    assert engine.usages[0].kv_tokens_per_rank == (23, 8, 8)
    assert [engine.usages[id].moved_tokens for id in range(4)] == [16, 0, 0, 0]
    assert not any(usage.preemptions for usage in engine.usages.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_what_has_moved_is_found_where_it_is(depth):
    """The next request of the same conversation begins with all of its blocks, each of which is cached once."""
    engine = Pressed(three_ranks(prefix_cache=True), depth)
    assert run(engine, *ASKED)
    tokens = [*ASKED[0].prompt_token_ids, *engine.outcomes[0].token_ids]
    assert engine.usages[0].moved_tokens > 0
    cached = sum(allocator.num_cached for allocator in engine.scheduler.pool.allocators)
    assert cached == len(engine.scheduler.pool.index) > 3 * 8
    run(engine, request(9, [*tokens, 1, 2, 3], 5))
    assert engine.usages[9].cached_tokens == (len(tokens) - 1) // 4 * 4


def test_what_has_moved_is_cached_where_it_was_until_the_next_step():
    """Its old blocks are free then, and those that other requests have taken over meanwhile stay theirs."""
    engine = Pressed(three_ranks(prefix_cache=True))
    engine.add(replace(ASKED[0], sampling=SamplingParams(max_new_tokens=20)), *ASKED[1:])
    while not (engine.runner.steps and engine.runner.steps[-1].moved):
        engine.step()
    (source, target), *_ = engine.runner.steps[-1].moved
    allocators = engine.scheduler.pool.allocators
    digest = allocators[source.owner].hash_of(source.id)
    assert engine.scheduler.pool.index[digest] == source
    assert allocators[source.owner].is_cached(source.id)
    held = engine.runner.steps[-1].moved[1:2]
    engine.scheduler.pool.share(block for block, _ in held)
    engine.step()
    assert engine.scheduler.pool.index[digest] == target
    assert allocators[source.owner].hash_of(source.id) is None
    assert allocators[held[0][0].owner].hash_of(held[0][0].id) is not None
    assert allocators[held[0][1].owner].hash_of(held[0][1].id) is None
    engine.scheduler.pool.unshare([block for block, _ in held])
    engine.drain()


def test_blocks_that_others_share_do_not_move():
    """Two requests begin alike on rank 0. Of the larger one only what is its own moves."""
    engine = Pressed(three_ranks(prefix_cache=True, num_blocks=14))
    engine.add(request(0, LONG[:32], 20))
    engine.step()
    engine.add(request(1, [*LONG[:32], 1], 16))
    while engine.loop.has_work:
        shared = {id for id, _ in engine.scheduler.pool.allocators[0]._extra_holders.items()}
        engine.step()
        check_blocks(engine.scheduler)
        assert shared.isdisjoint(source.id for source, _ in engine.runner.steps[-1].moved)
    assert sum(usage.moved_tokens for usage in engine.usages.values()) > 0
    assert not any(usage.preemptions for usage in engine.usages.values())


def test_where_there_is_too_little_room_to_move_the_next_block_goes_elsewhere():
    """A single block is left, on rank 2; the other ranks are full."""
    engine = Pressed(three_ranks(num_blocks=9))
    asked = [request(id, LONG[20 * id :][:tokens], 8) for id, tokens in enumerate((16, 29, 25, 8))]
    (widened,) = run(engine, *asked)
    assert widened.moves == ()
    assert not any(usage.preemptions for usage in engine.usages.values())
    assert [engine.usages[id].kv_tokens_per_rank[2] for id in (0, 3)] in ([3, 0], [0, 3])


def test_in_batch_invariant_mode_nothing_moves():
    """Merges add up in the order of the ranks, so that where blocks are may change bits."""
    engine = Pressed(three_ranks(batch_invariant=True))
    assert run(engine, *ASKED) == []
    assert sum(usage.preemptions for usage in engine.usages.values()) == 1


def until_rank_0_is_full(**more):
    engine = Pressed(three_ranks(**more))
    engine.add(*ASKED)
    while engine.scheduler.pool.allocators[0].available:
        engine.step()
    return engine, engine.scheduler._running[0]


def test_a_request_that_moves_and_is_preempted_in_the_same_step_moves_nothing():
    """Its KV is found where it was, and nothing where it would have gone."""
    engine, seq = until_rank_0_is_full(prefix_cache=True)
    scheduler = engine.scheduler
    before = dict(scheduler.pool.index)
    assert scheduler._widening.widen(0, seq, [seq])
    scheduler._turns.recount()
    scheduler._preempt(seq)
    assert scheduler.pool.index == before
    engine.step()
    assert engine.runner.steps[-1].changes.rebalances == ()
    check_blocks(scheduler)
    engine.drain()
    assert engine.usages[0].moved_tokens == 4 * engine.runner.moved_blocks.get(0, 0)


def test_a_request_moves_once_in_a_step():
    """What has just moved is not there yet, to move on."""
    engine, seq = until_rank_0_is_full()
    widening = engine.scheduler._widening
    assert widening._relieve(0, [seq])
    targets = {move.target.owner for move in widening._of_step[seq].moves}
    assert targets == {1, 2}
    assert not any(widening._relieve(rank, [seq]) for rank in range(3))


def test_a_request_does_not_move_from_where_it_was_promised_blocks():
    engine, seq = until_rank_0_is_full()
    seq.kv.reserved[1] = 1
    assert not engine.scheduler._widening._relieve(0, [seq])


def with_moves(result, step):
    return msgspec.structs.replace(result, measured=StepMeasurements(moved_s=0.5 if step.moved else 0.0))


def test_the_time_of_moves_is_the_request_s():
    engine = Pressed(three_ranks())
    execute = engine.runner.execute

    def timed(step):
        return with_moves(execute(step), step)

    engine.runner.execute = timed
    run(engine, *ASKED)
    assert [engine.usages[id].moved_s for id in range(4)] == [0.5, 0, 0, 0]


def test_a_step_moves_so_few_blocks_that_what_carries_them_has_room():
    """Where a request of 900 blocks has left, all ranks have some 450 on the average."""
    engine = Pressed(config(num_blocks=920, max_model_len=1000, block_tokens=1, placement="local", prefix_cache=False))
    engine.add(request(0, [1] * 900, 20), request(1, [2] * 905, 5))
    engine.step()
    engine.add(request(2, [3] * 10, 20))
    while not engine.outcomes[2].token_ids:
        engine.step()
    engine.abort(1)
    engine.drain()
    moved = [len(step.moved) for step in engine.runner.steps if step.moved]
    assert moved
    assert max(moved) <= 64
    assert not any(engine.usages[id].preemptions for id in (0, 2))


def test_the_time_of_moves_is_not_that_of_a_request_whose_next_block_alone_went_elsewhere():
    engine, seq = until_rank_0_is_full()
    scheduler, execute = engine.scheduler, engine.runner.execute
    engine.runner.execute = lambda step: with_moves(execute(step), step)
    assert scheduler._widening._relieve(0, [seq])
    assert scheduler._widening._go_elsewhere(scheduler._running[1])
    scheduler._turns.recount()
    engine.drain()
    (widened,) = [step.changes.rebalances for step in engine.runner.steps if step.moved]
    assert [(one.id, len(one.moves)) for one in widened] == [(0, 4), (1, 0)]
    assert [engine.usages[id].moved_s for id in range(4)] == [0.5, 0, 0, 0]
