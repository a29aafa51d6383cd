"""Layers with linear attention: a toy whose heads, states and projections are counted by hand."""

import numpy as np
import pytest

from longhelix.perf.flops import attention_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, weights_bytes
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_items, decode_seconds, step_items
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.work import Work
from longhelix.simulate.pool import with_pools
from longhelix.spec import LinearAttention, ModelSpec, MoE
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from scheduler_settings import scheduler_config
from toy_model import kv_elements, toy_model

pytestmark = pytest.mark.unit

# Four layers, the last of which attends to everything; two key heads of 12 channels, four value heads of 14.


def toy(num_layers: int, full_layers: tuple[int, ...]) -> ModelSpec:
    """A model with linear attention in all layers but `full_layers`."""
    return toy_model(
        "qwen3_next",
        num_layers=num_layers,
        hidden_size=64,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=16,
        ffn_size=32,
        vocab_size=100,
        max_positions=4096,
        dtype="bfloat16",
        moe=MoE(8, 2, 24),
        full_layers=full_layers,
        output_gate=True,
        linear=LinearAttention(2, 4, 12, 14, kernel_size=3),
    )


TOY = toy(4, (3,))
TOKEN_BYTES = 2 * 2 * 16 * 2
ROW_BYTES = 4 * ((16 + 16) * 2 + 4)  # of four heads: queries, outputs, LSEs
STATE = 12 * 14  # numbers of a value head
INPUTS = 64 * (2 * 2 * 12 + 2 * 4 * 14 + 2 * 4)  # queries, keys; values, gates; two rates
OUTPUT = 64 * 4 * 14
CONVOLUTION = 3 * (2 * 2 * 12 + 4 * 14)


def setting(model: ModelSpec = TOY, system: str = "h100") -> Setting:
    return Setting(model, load_system(system), Dtypes("bfloat16", "bfloat16"))


def layouts(*, local: bool = False, **degrees) -> Layouts:
    return Layouts.of([Layout(**degrees)], local=local)


def by_name(items):
    return {item.name: item for item in items}


def request_bytes(key_heads: int, value_heads: int) -> int:
    """Of one layer: states in float32, and two tokens of the convolution's channels in bfloat16."""
    return value_heads * STATE * 4 + 2 * (key_heads * 2 * 12 + value_heads * 14) * 2


@pytest.mark.parametrize(
    ("degrees", "heads", "requests"),
    [
        ({}, (2, 4), 3),
        ({"tpa": 2}, (1, 2), 3),
        ({"kvp": 2, "tpf": 2}, (1, 2), 3),
        ({"kvp": 2, "tpa": 2, "tpf": 4}, (1, 1), 3),
        ({"kvp": 8, "tpf": 8}, (1, 1), 3),  # more ranks than heads
        ({"kvp": 2, "tpf": 2, "local": True}, (2, 4), 2),  # three requests on two ranks
        ({"kvp": 2, "ffn_replicas": 2}, (2, 4), 3),  # tied
    ],
)
@pytest.mark.parametrize("context", [1000.0, 1e6])
def test_states_are_cut_by_heads_and_do_not_grow(degrees, heads, requests, context):
    """Over KVP x TPA ranks; requests with a rank of their own, and copies of the FFN, over TPA."""
    key_heads, value_heads = heads
    states = requests * request_bytes(key_heads, value_heads)
    item = by_name(decode_items(setting(), layouts(**degrees), 3.0, context))["linear attention"]
    passed = requests * (key_heads * 2 * 12 + value_heads * 3 * 14) * 2
    assert item.hbm_bytes[0] == 3 * (2 * states + passed)
    assert item.flops[0] == 3 * requests * value_heads * 6 * STATE
    kvp = degrees.get("kvp", 1)
    kv_heads = 1 if degrees.get("tpa") else 2
    kept = requests if degrees.get("local") else 3 / kvp
    tokens = kept * context * TOKEN_BYTES * kv_heads / 2
    assert kv_bytes(setting(), layouts(**degrees), 3.0, context)[0] == pytest.approx(tokens + 3 * states, rel=1e-12)


def test_a_prompt_takes_work_by_its_rows_and_one_state_a_chunk():
    """In chunks of 64 rows: six products of a chunk with keys, four with values, beside those with the state."""
    how, one = setting(), layouts()
    by_rows = []
    for rows, prefix in ((100.0, 0.0), (100.0, 5000.0), (200.0, 0.0)):
        item = by_name(step_items(how, one, one.chunk(rows, prefix)))["linear attention"]
        assert item.flops[0] == 3 * rows * 4 * (6 * STATE + 64 * (6 * 12 + 4 * 14))
        assert item.hbm_bytes[0] == 3 * (2 * request_bytes(2, 4) + rows * (2 * 2 * 12 + 4 * 3 * 14) * 2)
        by_rows.append(item.seconds[0])
    assert by_rows[0] == by_rows[1] < by_rows[2]


def test_the_whole_of_a_layer_is_held_and_multiplied():
    gated = 2 * 4 * 16  # queries and their gates
    full = 64 * (gated + 2 * 2 * 16) + 4 * 16 * 64
    ffn = 8 * 3 * 64 * 24 + 8 * 64
    held = weights_bytes(setting(), layouts())[0] / 2
    assert held == 3 * (INPUTS + OUTPUT + CONVOLUTION) + full + 4 * ffn + 2 * 64 * 100
    items = by_name(decode_items(setting(), layouts(), 5.0, 1000.0))
    assert items["linear projections"].flops[0] == 3 * 2 * 5 * INPUTS
    assert items["output projection"].flops[0] == 2 * 5 * (3 * OUTPUT + 64 * 64)
    split = by_name(decode_items(setting(), layouts(kvp=2, tpa=2, tpf=4), 5.0, 1000.0))
    # One key head of two on each of four ranks, one value head of four.
    assert split["linear projections"].flops[0] == 3 * 2 * 5 * 64 * (2 * 12 + 2 * 14 + 2)


def test_attention_is_that_of_the_other_layers_alone():
    item = by_name(decode_items(setting(), layouts(), 3.0, 1000.0))["attention"]
    assert item.hbm_bytes[0] == 3 * (1000 * TOKEN_BYTES + ROW_BYTES)
    assert setting().kv_token_bytes == TOKEN_BYTES
    assert kv_elements(TOY) == 2 * 2 * 16


def test_the_stage_with_most_full_layers_decides():
    model = toy(8, (3, 7))
    item = by_name(decode_items(setting(model), layouts(pp=2), 2.0, 1000.0))["attention"]
    assert item.hbm_bytes[0] == 2 * (
        1000 * TOKEN_BYTES + ROW_BYTES
    )  # two stages, one request and one such layer in each
    held = kv_bytes(setting(model), layouts(pp=4), 2.0, 1000.0)[0]
    assert held == 2 * (1000 * TOKEN_BYTES + request_bytes(2, 4))


def test_useful_work_is_by_rows():
    states = 4 * 6 * STATE
    assert attention_flops(TOY, 5.0, 1000.0) == 5 * 1000 * 2 * 2 * 16 * 4 + 3 * 5 * states
    assert attention_flops(TOY, 5.0, 2000.0) - attention_flops(TOY, 5.0, 1000.0) == 5 * 1000 * 2 * 2 * 16 * 4


def test_a_tokens_kv_has_no_part_of_a_state():
    """What schedulers move and swap are tokens."""
    cost = StepCost(setting(), Layout(kvp=2, tpf=2))
    assert cost.swap_seconds(160) == pytest.approx(2 * 160 * TOKEN_BYTES / load_system("h100").memory.swap_bytes_per_s)
    for work in (Work.decode(3, 1000), Work.chunk(10, 500)):
        assert np.isfinite(cost.seconds(work))


def test_the_preset_decodes_far_contexts_faster_than_one_that_attends_in_every_layer():
    how = Setting(load_model("qwen3-next-80b-a3b"), load_system("h200"), Dtypes("bfloat16", "bfloat16"))
    one = layouts(tpa=2)
    short_s, long_s = (decode_seconds(how, one, 1.0, context)[0] for context in (1e3, 1e6))
    read_s = 12 * 1e6 * 2 * 256 * 2 / (4.8e12 * how.system.memory.efficiency)
    assert long_s - short_s == pytest.approx(read_s, rel=0.01)
    assert np.isfinite(prefill_seconds(how, one, 1e6, 8192.0)[0])
    # 36 layers of 32 states of 128 x 128 in float32, and three tokens of 8,192 channels in bfloat16.
    states = kv_bytes(how, layouts(), 1.0, 0.0)[0]
    assert states == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_an_array_of_layouts_and_batches_costs_what_each_costs_alone():
    batches = np.array([1.0, 7.0])
    many = Layouts.of([Layout(tpa=2), Layout(kvp=2, tpa=2, pp=3), Layout(kvp=4, tpf=1, ep=4, pp=4)])
    block = many.as_column()
    together = decode_seconds(setting(), block, batches, 1e4), kv_bytes(setting(), block, batches, 1e4)
    for row, column in np.ndindex(3, 2):
        alone = many.take(np.array([row]))
        assert decode_seconds(setting(), alone, float(batches[column]), 1e4)[0] == together[0][row, column]
        assert kv_bytes(setting(), alone, float(batches[column]), 1e4)[0] == together[1][row, column]


def test_a_simulated_pool_is_what_states_leave():
    """Blocks of 16 tokens; states count once for each request, however many tokens a pool holds."""
    how, layout = setting(system="h100"), Layout(tpa=2)
    # As many rows in the largest step.
    sizes = ({"max_running": 1, "chunk_tokens": 100_064}, {"max_running": 100_001, "chunk_tokens": 64})
    configs = [scheduler_config(1, 1, 10**6, **size) for size in sizes]
    blocks = [with_pools(how, layout, config).num_blocks for config in configs]
    states = 100_000 * 3 * request_bytes(1, 2)
    assert (blocks[0] - blocks[1]) * 16 * TOKEN_BYTES / 2 == pytest.approx(states, abs=16 * TOKEN_BYTES)
