"""The growth limit of each request: its own, the engine's, or one that its time between tokens allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_growth import growing
from test_pressure import LONG, ByWork, Pressed, check_blocks, request
from test_scheduler import expected_output

from longhelix.errors import UserError
from longhelix.scheduler.growth_limits import limit_within
from longhelix.scheduler.request import ServiceLevel
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.work import Work
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit


class ByKv:
    """A token of KV takes a second, a step one more."""

    def seconds(self, work):
        return 1.0 + float(work.decode_kv_tokens)


class Free:
    """Nothing takes time, so that a limit that is left to the cost is the longest."""

    def seconds(self, work):
        return 0.0


@given(kvp=st.integers(1, 8), block_tokens=st.integers(1, 16), most_blocks=st.integers(1, 50), tbt_s=st.floats(0, 5000))
def test_the_limit_is_the_longest_that_stays_within_the_time(kvp, block_tokens, most_blocks, tbt_s):
    limit_tokens = limit_within(ByKv(), kvp, block_tokens, most_blocks * block_tokens, tbt_s)
    blocks, rest = divmod(limit_tokens, block_tokens)
    assert rest == 0
    assert 1 <= blocks <= most_blocks
    assert blocks == 1 or ByKv().seconds(Work.decode(1, kvp * limit_tokens)) <= tbt_s
    assert blocks == most_blocks or ByKv().seconds(Work.decode(1, kvp * (limit_tokens + block_tokens))) > tbt_s


def held(settings, **service):
    """Tokens on each rank of a request of 24 tokens and 8 new ones."""
    engine = Pressed(settings)
    one = request(0, LONG[:24], 8, **service)
    engine.add(one)
    while engine.loop.has_work:
        engine.step()
        check_blocks(engine.scheduler)
    assert engine.outcomes[0].token_ids == expected_output(one)
    return engine.usages[0].kv_tokens_per_rank


def test_a_request_s_own_limit_goes_before_the_engine_s():
    assert held(growing()) == (12, 11, 8)  # eight each, then striped
    assert held(growing(growth_limit_tokens=16)) == (16, 15, 0)
    assert held(growing(growth_limit_tokens=16), growth_limit_tokens=12) == (12, 12, 7)
    assert held(growing(growth_limit_tokens=16), growth_limit_tokens=15) == (12, 12, 7)  # whole blocks


def test_placement_auto_lets_a_request_with_a_limit_grow():
    """By its length it would be striped."""
    auto = growing(placement="auto", kvp_threshold_tokens=20)
    assert held(auto) == (12, 11, 8)
    assert held(auto, growth_limit_tokens=16) == (16, 15, 0)


def test_a_limit_that_is_left_to_the_cost_follows_the_time_between_tokens():
    """A decode takes 1.1 ms and 1 us for each token of KV, spread over three ranks; half of the time is for it."""
    auto = growing(growth_limit_tokens=None, max_model_len=60)
    assert held(auto) == (20, 11, 0)  # 80 ms: an even share of the longest request
    assert held(auto, tbt_slo_s=0.0023) == (16, 15, 0)  # 50 us: 16 tokens
    assert held(auto, tbt_slo_s=0.002) == (12, 11, 8)  # one block at least, then striped
    assert held(growing(growth_limit_tokens=None, max_model_len=60, tbt_target_s=0.0023)) == (16, 15, 0)
    assert ByWork().seconds(Work.decode(1, 3 * 16)) <= 0.0023 / 2 < ByWork().seconds(Work.decode(1, 3 * 20))


@pytest.mark.parametrize(
    ("settings", "limit_tokens", "said"),
    [
        ({}, 3, "growth_limit_tokens is 3, which is less than a KV block: set it to at least 4"),
        ({}, 8, "all KVP ranks together hold 24 tokens, but the request may have 31: set it to at least 12"),
        ({}, 11, "all KVP ranks together hold 24 tokens, but the request may have 31: set it to at least 12"),
        (
            {"max_model_len": 40},
            20,
            "each rank is set up for at most 16 tokens of a request: set it to at most 16, or raise --growth-limit",
        ),
        ({"placement": "striped"}, 16, "the placement is striped: set --placement to growing or auto, or leave it"),
        ({"placement": "local"}, 16, "the placement is local: set --placement to growing or auto, or leave it out"),
    ],
)
def test_limits_under_which_a_request_could_not_run_are_refused_in_a_sentence(settings, limit_tokens, said):
    engine = Pressed(growing(**settings))
    with pytest.raises(UserError, match=said):
        engine.add(request(0, LONG[:24], 8, growth_limit_tokens=limit_tokens))
    assert not engine.loop.has_work


def assert_fits_as_all_pools_do(num_blocks, prompt_tokens, new_tokens, **settings):
    config = scheduler_config(num_blocks=1, max_model_len=1000, block_tokens=4, **settings).with_pools(num_blocks)
    scheduler, one = Scheduler(config, Free()), request(0, list(range(prompt_tokens)), new_tokens)
    if -(-one.num_rows // 4) <= num_blocks * config.kvp:
        scheduler.add(one)
    else:
        with pytest.raises(UserError, match="tokens of KV cache"):
            scheduler.add(one)


@given(
    num_blocks=st.integers(1, 40),
    prompt_tokens=st.integers(1, 700),
    new_tokens=st.integers(1, 100),
    kvp=st.integers(1, 4),
    placement=st.sampled_from(["striped", "growing", "auto"]),
    growth_limit_tokens=st.none() | st.integers(1, 175).map(lambda blocks: 4 * blocks),
    kvp_threshold_tokens=st.integers(0, 700),
)
def test_whatever_all_pools_together_hold_runs(**drawn):
    """Limit and threshold may be those of ranks with larger pools."""
    assert_fits_as_all_pools_do(**drawn)


@pytest.mark.parametrize(
    ("prompt_tokens", "settings"),
    [
        (60, {"placement": "auto", "kvp_threshold_tokens": 72}),
        (45, {"placement": "auto", "kvp_threshold_tokens": 50}),
        (60, {"placement": "growing", "growth_limit_tokens": 64}),
        (60, {"placement": "growing", "growth_limit_tokens": None}),
    ],
)
def test_a_request_takes_more_ranks_where_the_pool_of_one_is_smaller_than_its_limit(prompt_tokens, settings):
    assert_fits_as_all_pools_do(10, prompt_tokens, 8, kvp=2, **settings)


@pytest.mark.parametrize("settings", [{}, {"max_model_len": 40}])
def test_what_the_refusal_asks_for_runs(settings):
    assert held(growing(**settings), growth_limit_tokens=12) == (12, 12, 7)


@pytest.mark.parametrize("value", [0, -4, 1.5, "16", True, 2**31])
def test_a_limit_is_a_whole_number_of_tokens(value):
    with pytest.raises(UserError, match="growth_limit_tokens is"):
        ServiceLevel(growth_limit_tokens=value)
