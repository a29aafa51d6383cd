"""Growing requests: owners and blocks of each rank, step by step, and which rank is taken next."""

import pytest
from test_pressure import LONG, Pressed, check_blocks, config, request
from test_scheduler import expected_output

from longhelix.scheduler.chunk_rule import FixedChunks

pytestmark = pytest.mark.unit


def growing(**more):
    """Two blocks of four tokens on a rank before the next one is taken."""
    return config(
        **{"kvp": 3, "num_blocks": 20, "placement": "growing", "growth_limit_tokens": 8, "prefix_cache": False} | more
    )


def run(engine, *asked):
    """Each step's owners of the first request's blocks."""
    engine.add(*asked)
    owners = []
    while engine.loop.has_work:
        engine.step()
        check_blocks(engine.scheduler)
        if asked[0].id in engine.runner.replicas:
            owners.append("".join(str(block.owner) for block in engine.runner.replicas[asked[0].id].blocks))
    engine.assert_nothing_is_left()
    for one in asked:
        assert engine.outcomes[one.id].token_ids == expected_output(one)
    return owners


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_that_crosses_its_limit_takes_the_next_rank(depth):
    engine = Pressed(growing(chunk_tokens=4), depth)
    owners = run(engine, request(0, LONG[:21], 3))
    known = ["0", "00", "001", "0011", "00112", "001122"]
    assert [*dict.fromkeys(owners)] == known[depth - 1 :]  # ranks are as many steps ahead
    assert engine.usages[0].kv_tokens_per_rank == (8, 8, 7)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_that_crosses_its_limit_takes_the_next_rank(depth):
    engine = Pressed(growing(), depth)
    owners = run(engine, request(0, LONG[:6], 32))
    assert [*dict.fromkeys(owners)][-1] == "0011220120"  # one block each in turn once all have their limit
    assert [*dict.fromkeys(owners)] == ["0011220120"[:blocks] for blocks in range(2, 11)]


def test_a_neighbours_load_changes_which_rank_an_answer_takes():
    """The neighbour begins on rank 1, where it has more than its limit of prompt, so rank 2 has more room."""
    engine = Pressed(growing())
    engine.add(request(0, LONG[:6], 20))
    engine.step()
    engine.add(request(1, LONG[40:45], 40))
    while len(engine.outcomes[0].token_ids) < 5:
        engine.step()
    owners = [block.owner for block in engine.runner.replicas[0].blocks]
    assert {block.owner for block in engine.runner.replicas[1].blocks} == {1}
    assert owners == [0, 0, 2]
    check_blocks(engine.scheduler)
    engine.drain()


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_a_neighbours_load_changes_which_rank_a_prompt_takes(chunk_tokens):
    """It begins on rank 0 with two blocks of rank 1 and one of rank 2 to come; others take one block of rank 2, one of
    rank 0 and two of rank 1. Then rank 2 has more room for it, and what it was promised changes places."""
    engine = Pressed(growing(chunk_tokens=4))
    engine.add(request(0, LONG[:20], 4))
    engine.step()
    engine.add(*(request(id, LONG[id : id + tokens], 9) for id, tokens in ((1, 4), (2, 4), (3, 8))))
    engine.scheduler._chunk_rule = FixedChunks(chunk_tokens)
    assert engine.scheduler._running[0].kv.reserved == [1, 2, 1]
    engine.step()
    check_blocks(engine.scheduler)
    while not engine.outcomes[0].token_ids:
        engine.step()
        check_blocks(engine.scheduler)
    assert [block.owner for block in engine.runner.replicas[0].blocks] == [0, 0, 2, 2, 1]
    assert engine.scheduler._running[0].kv.reserved == [0, 0, 0]
    engine.drain()


def test_in_batch_invariant_mode_the_load_changes_nothing():
    engine = Pressed(growing(batch_invariant=True))
    engine.add(request(0, LONG[:6], 20))
    engine.step()
    engine.add(request(1, LONG[40:56], 40))  # on ranks 0 and 1
    while len(engine.outcomes[0].token_ids) < 5:
        engine.step()
    assert [block.owner for block in engine.runner.replicas[0].blocks] == [0, 0, 1]
    engine.drain()


def test_ranks_that_are_not_taken_yet_serve_others():
    """A short request has two ranks' pools to itself while the long one is within its limit."""
    engine = Pressed(growing(kvp=2, num_blocks=6, growth_limit_tokens=24))
    long, short = request(0, LONG[:8], 20), request(1, LONG[40:50], 12)
    owners = run(engine, long, short)
    assert owners[-1] == "0000001"
    assert all(usage.preemptions == 0 for usage in engine.usages.values())
