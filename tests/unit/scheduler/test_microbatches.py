"""With pipeline stages decodes take turns in microbatches, and each step has the rows of one."""

import random
from itertools import pairwise

import pytest
from test_scheduler import BATCH, Engine, config, expected_output, request

from longhelix.scheduler.loop import most_in_flight

pytestmark = pytest.mark.unit


def engine(pp, depth=None, **settings):
    return Engine(config(pp=pp, **settings), most_in_flight(pp) if depth is None else depth)


def rows(steps):
    """Microbatch, decodes and prompt tokens of each step."""
    return [(step.turn.microbatch, step.work.decode_rows, step.work.chunk_rows) for step in steps]


@pytest.mark.parametrize("placement", ["striped", "growing", "local"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_outputs_do_not_depend_on_stages(pp, chunk_tokens, placement):
    run = engine(pp, chunk_tokens=chunk_tokens, placement=placement, growth_limit_tokens=8)
    run.add(*BATCH)
    outcomes = run.drain()
    assert all(outcomes[one.id].token_ids == expected_output(one) for one in BATCH)


def test_chunks_follow_each_other_in_all_steps_that_may_be_in_flight():
    run = engine(3, chunk_tokens=4)
    run.add(request(0, 40, 1))
    run.step()
    assert rows(run.runner.steps) == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (0, 0, 4)]


def test_two_that_decode_take_turns_and_neither_waits_for_the_other():
    run = engine(2)
    run.add(request(0, 5, 6), request(1, 9, 6))
    run.drain()
    # Both prompts; nothing can be done before their tokens are there; then one row in each step.
    assert rows(run.runner.steps)[:6] == [(0, 0, 14), *[(1, 1, 0), (0, 1, 0)] * 2, (1, 1, 0)]
    assert run.runner.steps[1].changes.joining != run.runner.steps[2].changes.joining


def test_a_lone_request_has_two_steps_in_flight_at_most():
    run = engine(4)
    run.add(request(0, 5, 20))
    for _ in range(6):
        run.step()
    in_flight = len(run.runner.results)
    assert in_flight == 1  # beside the one that has just ended
    assert {step.turn.microbatch for step in run.runner.steps[1:]} == {0}


def test_a_prompt_that_ends_joins_the_smallest_microbatch():
    run = engine(3)
    for id in range(7):
        run.add(request(id, 5, 60))
        for _ in range(4):
            run.step()
    sizes = [len(decoding) for decoding in run.runner.microbatches]
    assert sorted(sizes) == [2, 2, 3]


def test_chunks_run_beside_every_microbatch_in_turn():
    run = engine(2, chunk_tokens=4)
    run.add(request(0, 4, 60))
    for _ in range(6):
        run.step()
    run.add(request(1, 40, 1))
    before = len(run.runner.steps)
    for _ in range(6):
        run.step()
    found = rows(run.runner.steps[before:])[:6]
    assert [chunk for _, _, chunk in found] == [4] * 6
    assert [decodes for _, decodes, _ in found] in ([1, 0] * 3, [0, 1] * 3)


def test_all_microbatches_have_every_third_step():
    run = engine(3, chunk_tokens=8)
    run.add(*(request(id, 6, 30) for id in range(9)))
    run.drain()
    full = [step for step in run.runner.steps if step.work.decode_rows == 3 and not step.chunks]
    assert len(full) > 60
    assert all((after.turn.microbatch - step.turn.microbatch) % 3 == 1 for step, after in pairwise(full))


class ByTokens:
    """KV takes time, and rows next to none."""

    def seconds(self, work):
        return 1e-6 * work.rows + 1e-3 * (work.decode_kv_tokens + work.chunk_rows)


def members(run):
    return [sorted(decoding) for decoding in run.runner.microbatches]


def test_long_requests_are_dealt_by_what_they_take():
    """In whatever order they come: each microbatch has one long and one short request."""
    for order in ([0, 1, 2, 3], [2, 0, 1, 3], [0, 2, 1, 3]):
        run = engine(2, chunk_tokens=1000)
        run.scheduler._turns._cost = ByTokens()
        prompts = {0: 100, 1: 90, 2: 4, 3: 6}
        for id in order:
            run.add(request(id, prompts[id], 30))
            for _ in range(3):
                run.step()
        for _ in range(3):
            run.step()
        assert sum(map(len, members(run))) == 4
        assert {len({0, 1} & set(ids)) for ids in members(run)} == {1}, order


def test_a_microbatch_that_is_left_empty_gets_the_longest_of_another():
    run = engine(2, chunk_tokens=1000)
    for id, (prompt, new) in enumerate([(40, 60), (5, 4), (30, 60), (5, 4)]):
        run.add(request(id, prompt, new))
        run.step()
        run.step()
    for _ in range(12):
        run.step()
    assert sorted(members(run)) == [[0], [2]]
    outcomes = run.drain()
    assert outcomes[0].token_ids == expected_output(request(0, 40, 60))
    assert outcomes[2].token_ids == expected_output(request(2, 30, 60))


@pytest.mark.parametrize("num_blocks", [12, 16])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_what_a_request_held_is_said_under_pressure_too(pp, num_blocks):
    """Nobody who has only a token on its way is preempted."""
    preempted = 0
    for seed in range(6):
        chance = random.Random(seed)
        asked = [request(id, chance.randint(1, 20), chance.randint(1, 18)) for id in range(20)]
        run = engine(pp, num_blocks=num_blocks, max_model_len=40, chunk_tokens=16, max_running=8)
        run.add(*asked)
        outcomes = run.drain()
        preempted += sum(len(step.changes.new) for step in run.runner.steps) - len(asked)
        for one in asked:
            held = outcomes[one.id].kv_tokens_per_rank
            assert sum(held) == len(one.prompt_token_ids) + one.sampling.max_new_tokens - 1
            assert outcomes[one.id].token_ids == expected_output(one)
    assert preempted
