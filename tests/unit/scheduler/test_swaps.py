"""What others needed the room of comes back from where it was swapped to, where that costs less than computing it."""

import pytest
from test_prefix_cache import ran
from test_pressure import LONG, ByWork, Pressed, config, request
from test_scheduler import expected_output

from longhelix.errors import UserError
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.work import Work

pytestmark = pytest.mark.unit

OTHERS = LONG[::-1]


def swapped(engine):
    """Blocks that went out and came back, over all steps."""
    steps = engine.runner.steps
    return sum(len(step.transfers.swapped_out) for step in steps), sum(len(step.transfers.swapped_in) for step in steps)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
def test_a_document_comes_back_after_others_have_had_its_room(placement, depth):
    more = {"placement": placement, "growth_limit_tokens": 8, "kvp_threshold_tokens": 40}
    engine = Pressed(config(num_blocks=16, swap_blocks=40, **more), depth)
    assert ran(engine, request(0, [*LONG[:40], 1, 2], 5)) == [0]
    for id in range(1, 4):
        ran(engine, request(id, OTHERS[id * 10 : id * 10 + 50], 14))
    assert ran(engine, request(9, [*LONG[:40], 3, 4, 5], 5)) == [40]
    assert 0 < engine.usages[9].swapped_tokens <= 40
    assert swapped(engine)[1] * 4 >= engine.usages[9].swapped_tokens


def test_a_block_that_is_filled_in_part_is_swapped_in_as_the_requests_own():
    engine = Pressed(config(kvp=1, num_blocks=12, swap_blocks=12))
    ran(engine, request(0, LONG[:32], 5))
    ran(engine, request(1, OTHERS[:44], 4))
    assert ran(engine, request(2, LONG[:32], 5)) == [31]
    assert engine.usages[2].swapped_tokens == 31
    (step,) = [step for step in engine.runner.steps if step.transfers.swapped_in]
    assert len(step.transfers.swapped_in) == 8
    assert not step.transfers.copies
    # Its own last block is another's than that of the slot, and the slot still serves.
    ran(engine, request(3, OTHERS[:44], 4))
    assert ran(engine, request(4, LONG[:32], 5)) == [31]


def test_a_prefix_may_be_there_in_part():
    """A prompt's last blocks go first; the first ones are shared, and the others come back."""
    engine = Pressed(config(kvp=1, num_blocks=16, swap_blocks=16))
    ran(engine, request(0, LONG[:40], 1))
    ran(engine, request(1, OTHERS[:40], 1))
    assert ran(engine, request(2, [*LONG[:40], 1], 1)) == [40]
    assert engine.usages[2].swapped_tokens == 16
    assert len(engine.runner.new[2].kv.cached_blocks) == 10


def test_what_was_swapped_in_is_found_again_and_not_swapped_out_twice():
    engine = Pressed(config(kvp=1, num_blocks=12, swap_blocks=40))
    for turn in range(6):
        tokens = (LONG if turn % 2 == 0 else OTHERS)[:40]
        assert ran(engine, request(turn, tokens, 1)) == [0 if turn < 2 else 39]
    assert swapped(engine)[0] == len(engine.scheduler.pool.swaps.index)


def test_a_preempted_request_is_not_computed_again():
    run = {}
    for swap_blocks in (0, 16):
        engine = Pressed(config(kvp=1, num_blocks=16, swap_blocks=swap_blocks))
        asked = [request(0, LONG[:40], 20), request(1, LONG[50:60], 30)]
        engine.add(*asked)
        outcomes = engine.drain()
        assert all(outcomes[one.id].token_ids == expected_output(one) for one in asked)
        run[swap_blocks] = engine.usages[1]
    assert (run[0].preemptions, run[0].swapped_tokens) == (1, 0)
    assert (run[16].preemptions, run[16].swapped_tokens > 0) == (1, True)
    assert run[16].recomputed_tokens < run[0].recomputed_tokens
    assert run[16].recomputed_tokens < 4  # of its last block, which was not full


def test_few_slots_keep_the_beginning():
    """Without it nothing behind it is found."""
    engine = Pressed(config(kvp=1, num_blocks=12, swap_blocks=3))
    ran(engine, request(0, LONG[:40], 1))
    ran(engine, request(1, OTHERS[:44], 1))
    # One block had room enough to stay.
    assert ran(engine, request(2, LONG[:40], 1)) == [4 + 12]
    assert engine.usages[2].swapped_tokens == 12


@pytest.mark.parametrize(("swap_s", "found"), [(0.0, 40), (1.0, 0)])
def test_what_costs_less_to_compute_is_not_swapped(swap_s, found):
    engine = Pressed(config(kvp=1, num_blocks=14, swap_blocks=40), swap_s=swap_s)
    ran(engine, request(0, LONG[:40], 1))
    ran(engine, request(1, OTHERS[:56], 1))
    assert ran(engine, request(2, [*LONG[:40], 1], 1)) == [found]
    assert engine.usages[2].swapped_tokens == found
    assert (swapped(engine)[0] > 0) == (found > 0)


def test_blocks_far_behind_the_beginning_are_swapped_before_others():
    """They read more, so they cost more to compute: here the blocks from token 2,048 on are worth it."""
    engine = Pressed(config())
    seconds = ByWork().seconds
    early, late = (seconds(Work.chunk(1024, prefix)) * 4 / 1024 for prefix in (1024, 2048))
    engine = Pressed(config(swap_blocks=1), swap_s=(early + late) / 2)
    pays = [engine.scheduler._swap_pays(start) for start in range(0, 4096, 4)]
    assert pays == [start >= 2048 for start in range(0, 4096, 4)]


def test_blocks_that_are_written_to_before_the_next_step_are_not_swapped():
    engine = Pressed(config(kvp=1, num_blocks=12, swap_blocks=12))
    ran(engine, request(0, LONG[:40], 1))
    held = engine.pin(request(-1, OTHERS[:44], 1))
    assert held is not None
    engine.runner.load(held.blocks, held.num_cached, OTHERS)
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    assert ran(engine, request(1, [*LONG[:40], 1], 1)) == [4]
    assert swapped(engine)[1] == 0
    assert ran(engine, request(2, OTHERS[:44], 1)) == [43]  # which the prompt before has displaced


def test_it_takes_the_prefix_cache():
    with pytest.raises(UserError, match="set prefix_cache to True, or leave swap_tokens out"):
        config(prefix_cache=False, swap_blocks=1)
