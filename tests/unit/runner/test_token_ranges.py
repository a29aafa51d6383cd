"""Which compiled graph a step has, and the one predicate of sequence parallelism."""

import pytest

from longhelix.runner.token_ranges import ONE_RANGE, TokenRanges
from longhelix.runner.warm_up import warm_up_steps
from longhelix.scheduler.config import SchedulerConfig

pytestmark = pytest.mark.unit


def test_ranges_follow_each_other():
    ranges = TokenRanges((16, 1000, 4096), 1000)
    found = [ranges.range_of(tokens) for tokens in (1, 15, 16, 999, 1000, 4095, 4096, 10**9)]
    assert found == [
        (1, 15), (1, 15), (16, 999), (16, 999), (1000, 4095), (1000, 4095), (4096, None), (4096, None)
    ]  # fmt: skip
    assert ONE_RANGE.range_of(5) == (1, None)
    assert TokenRanges((1,), 1).range_of(1) == (1, None)


def test_a_step_is_sequence_parallel_where_its_range_is():
    ranges = TokenRanges((16, 1000), 1000)
    for tokens in (1, 16, 999, 1000, 5000):
        assert ranges.shards(tokens, decodes=False) == (ranges.range_of(tokens)[0] >= 1000)
        assert not ranges.shards(tokens, decodes=True)
    assert not ONE_RANGE.shards(5000, decodes=False)


def test_every_range_has_a_chunk_before_the_first_request():
    config = SchedulerConfig(2, 1000, 10_000, chunk_tokens=64, max_running=4)
    ranges = TokenRanges((1, 9, 30, 1000), 30)
    steps = warm_up_steps(config, [4096], ranges)
    warmed = {ranges.range_of(step.chunks[0].num_tokens) for step in steps if len(step.chunks) == 1}
    assert warmed == {(1, 8), (9, 29), (30, 999)}
