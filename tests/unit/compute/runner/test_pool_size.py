"""How many KV blocks a pool holds: bytes against hand-made numbers, shares of memory, what is refused."""

from dataclasses import replace

import pytest

from longhelix.compute.models.parameters import declare
from longhelix.compute.runner.pool_size import (
    affordable_blocks,
    kv_bytes_per_token,
    num_blocks,
    num_blocks_of_many,
    split_state_bytes,
)
from longhelix.errors import UserError
from longhelix.scheduler.kv.splits import most_state_bytes
from longhelix.spec import RopeSpec
from longhelix.spec.attention import Visibility
from longhelix.spec.layout import Layout
from scheduler_settings import scheduler_config
from toy_model import toy_model

pytestmark = pytest.mark.unit

SPEC = toy_model(
    architecture="llama",
    num_layers=3,
    hidden_size=64,
    num_query_heads=6,
    num_kv_heads=3,
    head_size=16,
    ffn_size=32,
    vocab_size=48,
    max_positions=4096,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    dtype="float32",
)
TOKEN_BYTES = 3 * 3 * 2 * 16 * 2  # layers, KV heads, keys and values, channels of bfloat16


def weights_bytes(layout, ranks):
    return sum(2 * parameter.num_elements for rank in ranks for parameter in declare(SPEC, layout, rank))


def affordable(layout, memory_bytes, ranks, block_tokens=16):
    scheduler = scheduler_config(layout.kvp, 1, 4096, block_tokens=block_tokens)
    return affordable_blocks(
        SPEC, layout, "bfloat16", "bfloat16", "bfloat16", "cpu", scheduler, (), memory_bytes, ranks
    )


def test_a_token_takes_the_keys_and_values_of_the_ranks_own_heads():
    assert kv_bytes_per_token(SPEC, Layout(), "bfloat16", "cpu", 0) == TOKEN_BYTES
    assert kv_bytes_per_token(SPEC, Layout(kvp=4), "bfloat16", "cpu", 3) == TOKEN_BYTES  # KVP shares tokens, not heads
    halves = [kv_bytes_per_token(SPEC, Layout(tpa=2), "bfloat16", "cpu", rank) for rank in range(2)]
    assert halves == [TOKEN_BYTES * 2 // 3, TOKEN_BYTES // 3]


@pytest.mark.parametrize("layout", [Layout(), Layout(kvp=2), Layout(kvp=2, tpa=2)], ids=str)
def test_ranks_take_four_fifths_of_what_their_weights_leave_of_the_memory_that_they_share(layout):
    ranks = range(layout.world_size)
    token_bytes = sum(kv_bytes_per_token(SPEC, layout, "bfloat16", "cpu", rank) for rank in ranks)
    left_bytes = 10 * 16 * token_bytes * 5 // 4  # of which four fifths are ten blocks of each rank
    held_bytes = weights_bytes(layout, ranks)
    assert affordable(layout, held_bytes + left_bytes, ranks) == 10
    assert affordable(layout, held_bytes + left_bytes - 2, ranks) == 9


def test_a_rank_with_a_memory_of_its_own_counts_alone():
    layout = Layout(tpa=2)
    for rank in range(2):
        token_bytes = kv_bytes_per_token(SPEC, layout, "bfloat16", "cpu", rank)
        memory_bytes = weights_bytes(layout, [rank]) + 2 * 7 * 16 * token_bytes
        assert affordable(layout, memory_bytes, range(rank, rank + 1)) == int(2 * 7 * 0.8)


def test_memory_that_holds_no_token_or_no_block_is_refused_with_what_to_do():
    held_bytes = weights_bytes(Layout(), [0])
    for memory_bytes in (0, held_bytes, held_bytes + TOKEN_BYTES):
        with pytest.raises(UserError, match=f"the weights take {held_bytes} bytes, which leaves no memory") as raised:
            affordable(Layout(), memory_bytes, range(1))
        assert raised.value.code == "out_of_memory"
    with pytest.raises(UserError, match=r"holds 8 tokens of KV cache.*set --block-tokens to at most 8"):
        affordable(Layout(), held_bytes + 10 * TOKEN_BYTES, range(1))
    assert affordable(Layout(), held_bytes + 10 * TOKEN_BYTES, range(1), block_tokens=8) == 1


def test_what_is_asked_for_is_shared_by_the_kvp_ranks_and_rounded_up_to_blocks():
    assert num_blocks(1000, 10, affordable=100, block_tokens=16, kvp=1) == 63
    assert num_blocks(1000, 10, affordable=100, block_tokens=16, kvp=4) == 16
    assert num_blocks(1600, 10, affordable=100, block_tokens=16, kvp=1) == 100
    with pytest.raises(UserError, match=r"kv_cache_tokens is 1601.*at most 1600") as raised:
        num_blocks(1601, 10, affordable=100, block_tokens=16, kvp=1)
    assert raised.value.code == "out_of_memory"


@pytest.mark.filterwarnings("error")
def test_without_being_asked_a_pool_holds_the_longest_request_as_far_as_memory_allows():
    assert num_blocks(None, 160, affordable=100, block_tokens=16, kvp=2) == 10
    assert num_blocks(None, 161, affordable=100, block_tokens=16, kvp=2) == 11
    with pytest.warns(UserWarning, match="memory holds 3200 tokens of KV cache, less than one request"):
        assert num_blocks(None, 1601, affordable=100, block_tokens=16, kvp=2) == 100


def test_many_requests_have_their_room_as_far_as_memory_allows():
    assert num_blocks_of_many(64 * 100, 1000, 16, 2, shares_memory=False) == 200
    assert num_blocks_of_many(64 * 100 + 1, 1000, 16, 2, shares_memory=False) == 201
    assert num_blocks_of_many(64 * 100, 150, 16, 2, shares_memory=False) == 150
    assert num_blocks_of_many(64 * 100, 150, 16, 2, shares_memory=True) == 75
    assert num_blocks_of_many(64 * 100, 1, 16, 2, shares_memory=True) == 1


def test_states_of_splits_are_those_of_the_ranks_query_heads():
    layout = Layout(tpa=2)
    for rank, heads in enumerate((4, 2)):
        assert split_state_bytes(SPEC, layout, 100_000, rank) == most_state_bytes(100_000, heads, 16)


def windowed(limits):
    """The model with windows of so many tokens in its layers. None: a layer that sees everything."""
    layers = tuple(
        layer if limit is None else layer.with_attention(visibility=Visibility(window_tokens=limit))
        for layer, limit in zip(SPEC.layers, limits, strict=True)
    )
    return replace(SPEC, layers=layers)


@pytest.mark.parametrize("limits", [(None, 40, 40), (40, None, 40), (40, 40, 40), (None, 40, 100)])
@pytest.mark.parametrize("with_ends", [True, False])
@pytest.mark.parametrize("blocks", [20, 100, 1000])
def test_pools_and_those_of_windows_share_the_memory(limits, with_ends, blocks):
    """As many KV blocks as fit beside what their number gives windows, and not one more."""
    spec, layout = windowed(limits), Layout(kvp=2)
    scheduler = scheduler_config(2, 1, 4096, max_running=4, chunk_tokens=64, prefix_cache=True)
    block_bytes = [
        16 * kv_bytes_per_token(spec, layout, "bfloat16", "cpu", 0, [group]) for group in range(1 + len(spec.views))
    ]
    assert sum(block_bytes) == 16 * TOKEN_BYTES
    sizes = 5, 10
    memory_bytes = weights_bytes(layout, [0]) + blocks * 16 * TOKEN_BYTES * sizes[1] // sizes[0]
    kinds = spec, layout, "bfloat16", "bfloat16", "bfloat16", "cpu", scheduler, spec.views
    found = affordable_blocks(*kinds, memory_bytes, [0], with_ends=with_ends)
    free_bytes = (memory_bytes - weights_bytes(layout, [0])) * 0.8

    def taken(count):
        windows = scheduler.windows_of(spec.views, count, with_ends=with_ends)
        counts = (count, *(window.num_blocks for window in windows))
        return sum(each * size for each, size in zip(counts, block_bytes, strict=True))

    assert taken(found) <= free_bytes
    plain = affordable_blocks(SPEC, *kinds[1:-1], (), memory_bytes, [0])
    most_without = max(scheduler.most_listed_blocks, plain)  # where all layers have windows
    assert taken(found + 1) > free_bytes or (not block_bytes[0] and found == most_without)
    assert found > plain or blocks == 20 or found == most_without
