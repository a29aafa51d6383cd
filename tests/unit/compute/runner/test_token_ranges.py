"""Which compiled graph a step has, and the one predicate of sequence parallelism."""

import pytest

from longhelix.compute.runner.token_ranges import ONE_RANGE, TokenRanges
from longhelix.compute.runner.warm_up import BLANK, warm_up_steps
from scheduler_settings import scheduler_config

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


@pytest.mark.parametrize("images", [False, True])
def test_every_range_has_chunks_before_the_first_request(images):
    """Of one prompt and of two, and of a range that no chunk reaches one beside decodes; if models read images, also
    with one in each."""
    config = scheduler_config(2, 1000, 10_000, chunk_tokens=64, max_running=8)
    ranges = TokenRanges((1, 9, 30, 70, 10**9), 30)
    steps = [step for step in warm_up_steps(config, [4096], ranges, images) if step.chunks]
    for shown in (False, True):
        rows = [
            [chunk.num_tokens for chunk in step.chunks]
            for step in steps
            if any(new.images for new in step.changes.new) == shown
            and max(chunk.num_tokens for chunk in step.chunks) > 1
        ]
        for least in (1, 9, 30):
            of_range = {len(counts) for counts in rows if ranges.range_of(sum(counts))[0] == least}
            assert of_range >= ({1, 2} if images or not shown else set())
        beyond = {tuple(counts) for counts in rows if ranges.range_of(sum(counts))[0] == 70}
        assert beyond == ({(64, 1, 1, 1, 1, 1, 1)} if images or not shown else set())
    for new in (new for step in steps for new in step.changes.new if new.images):
        assert [image.num_tokens for image in new.images] == [new.capacity_tokens]
        assert new.images[0].digest == BLANK
