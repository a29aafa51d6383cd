"""Layers with windows, and experts in some layers: toys of two and four layers, counted by hand."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.perf.flops import attention_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, weights_bytes
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.runs import Runs
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.perf.stages import balanced
from longhelix.perf.step import decode_items, decode_seconds, step_items
from longhelix.perf.step_cost import StepCost
from longhelix.perf.threshold import local_threshold_tokens
from longhelix.scheduler.work import Work
from longhelix.spec import LayerSpec, ModelSpec, MoE, Visibility
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.presets import load_model, load_system
from toy_model import EVERYTHING, attention_of, toy_model

pytestmark = pytest.mark.unit

# Two layers: the first sees 100 tokens, the second all.


def toy(num_layers: int = 2, full_layers: tuple[int, ...] = (1,), **changes) -> ModelSpec:
    """A model with a window of 100 tokens in all layers but `full_layers`."""
    sizes = {"hidden_size": 64, "num_query_heads": 4, "num_kv_heads": 2, "head_size": 16, "ffn_size": 32}
    sizes |= {"vocab_size": 100, "max_positions": 4096, "visibility": Visibility(window_tokens=100)}
    return toy_model(**sizes | {"dtype": "bfloat16", "num_layers": num_layers, "full_layers": full_layers} | changes)


TOY = toy()
PLAIN = toy(visibility=EVERYTHING)
TOKEN_BYTES = 2 * 2 * 16 * 2  # of a layer: KV heads, keys and values, channels, bytes
ROW_BYTES = 4 * (2 * 16 * 2 + 4)  # of a layer: query heads, a query and an output, channels, bytes, and an LSE
PAIR_FLOPS = 2 * 2 * 16 * 4  # products and sums, of scores and values, channels, query heads


def setting(model: ModelSpec = TOY, system: str = "h100") -> Setting:
    return Setting(model, load_system(system), Dtypes("bfloat16", "bfloat16"))


def layouts(*, local: bool = False, **degrees) -> Layouts:
    return Layouts.of([Layout(**degrees)], local=local)


def attention(items):
    return next(item for item in items if item.name == "attention")


@pytest.mark.parametrize(
    ("degrees", "rows", "tokens"),
    [
        ({}, 3, 3 * (1000 + 100)),
        ({"kvp": 4}, 3, 3 * (1000 + 100) / 4),
        ({"kvp": 4, "local": True}, 1, 1000 + 100),  # three requests on four ranks
        ({"kvp": 2, "local": True}, 2, 2 * (1000 + 100)),
    ],
)
def test_a_decode_row_reads_its_window_in_layers_that_have_one(degrees, rows, tokens):
    item = attention(decode_items(setting(), layouts(**degrees), 3.0, 1000.0))
    assert item.hbm_bytes[0] == tokens * TOKEN_BYTES + 2 * rows * ROW_BYTES
    assert item.flops[0] == tokens * PAIR_FLOPS


def test_drafts_see_their_request_windows_once():
    drafted = attention(decode_items(replace(setting(), drafts=Drafts(3)), layouts(), 3.0, 1000.0))
    assert drafted.hbm_bytes[0] == 3 * (1000 + 100) * TOKEN_BYTES + 2 * 12 * ROW_BYTES
    assert drafted.flops[0] == 4 * 3 * (1000 + 100) * PAIR_FLOPS


@pytest.mark.parametrize("context", [1.0, 60.0, 100.0])
def test_what_a_window_does_not_hide_costs_what_it_costs_without(context):
    for formula in (decode_seconds, kv_bytes):
        assert formula(setting(), layouts(kvp=2), 3.0, context) == formula(setting(PLAIN), layouts(kvp=2), 3.0, context)
    both = [prefill_seconds(setting(model), layouts(), context, 16.0) for model in (TOY, PLAIN)]
    assert both[0] == both[1]


def test_a_window_hides_what_lies_before_it():
    for formula in (decode_seconds, kv_bytes):
        assert (formula(setting(), layouts(), 3.0, 1e6) < formula(setting(PLAIN), layouts(), 3.0, 1e6)).all()
    assert (
        prefill_seconds(setting(), layouts(), 1e6, 512.0)[0] < prefill_seconds(setting(PLAIN), layouts(), 1e6, 512.0)[0]
    )


@pytest.mark.parametrize(
    ("prefix", "kv_tokens", "pairs"),
    [
        # Ten rows see 500 tokens before them and themselves; with a window 100 each, of 99 before and themselves.
        (500, 510 + 109, 10 * 500 + 55 + 10 * 100),
        # 25.5 tokens on average, in both layers.
        (20, 30 + 30, 255 + 255),
    ],
)
@pytest.mark.parametrize("kvp", [1, 4])
def test_a_chunk_reads_the_window_before_it_and_itself(prefix, kv_tokens, pairs, kvp):
    item = attention(step_items(setting(), layouts(kvp=kvp), layouts(kvp=kvp).chunk(10.0, float(prefix))))
    assert item.hbm_bytes[0] == kv_tokens * TOKEN_BYTES / kvp + 2 * 10 * ROW_BYTES
    assert item.flops[0] == pairs * PAIR_FLOPS / kvp


def test_rows_of_chunked_attention_see_half_of_their_chunk_on_average():
    """1 to 100 tokens, which is 50.5; a decode row is priced as the last of its chunk."""
    chunked = setting(toy(visibility=Visibility(chunk_tokens=100)))
    item = attention(step_items(chunked, layouts(), layouts().chunk(10.0, 500.0)))
    assert item.flops[0] == (10 * 500 + 55 + 505) * PAIR_FLOPS
    assert attention(decode_items(chunked, layouts(), 3.0, 1000.0)).flops[0] == 3 * 1100 * PAIR_FLOPS


# A window of 100 tokens lies in 7 blocks of 16; a request has one block more for others, one to write to, and one that
# the window has only a part of.
KEPT = 10 * 16


def test_layers_with_a_window_keep_what_a_request_is_promised():
    def held(context, **degrees):
        return kv_bytes(setting(), layouts(**degrees), 3.0, context)[0] / TOKEN_BYTES

    assert held(1000.0) == 3 * (1000 + KEPT)
    assert held(60.0) == 3 * (60 + 60)
    assert held(1000.0, kvp=4) == 3 * (1000 + KEPT) / 4
    assert held(1000.0, kvp=4, local=True) == 1000 + KEPT
    assert held(1000.0, tpa=2) == 3 * (1000 + KEPT) / 2
    assert held(1000.0, pp=2) == 3 * 1000  # the fullest stage has the layer without


def test_a_model_whose_layers_all_have_a_window_keeps_and_reads_that_alone():
    sliding, stages = setting(toy(full_layers=())), layouts(pp=2)
    assert kv_bytes(sliding, layouts(), 3.0, 1000.0)[0] == 3 * 2 * KEPT * TOKEN_BYTES
    assert kv_bytes(sliding, stages, 3.0, 1000.0)[0] == 3 * KEPT * TOKEN_BYTES
    # Two stages of one layer each take a micro-batch of two.
    read = attention(decode_items(sliding, stages, 3.0, 1000.0)).hbm_bytes[0]
    assert read == 2 * 2 * (100 * TOKEN_BYTES + ROW_BYTES)


def test_the_slowest_stage_is_the_one_with_most_layers_without_a_window():
    """Of layers that have one and have none by turns a stage of three has two without, one of two has one."""
    model = toy(6, (1, 3, 5))
    read = attention(decode_items(setting(model), layouts(pp=2), 2.0, 1000.0)).hbm_bytes[0]
    # Two stages of three layers, one request in each.
    assert read == 2 * ((2 * 1000 + 100) * TOKEN_BYTES + 3 * ROW_BYTES)
    assert kv_bytes(setting(model), layouts(pp=3), 2.0, 1000.0)[0] == 2 * (1000 + KEPT) * TOKEN_BYTES


def test_schedulers_price_steps_as_if_no_layer_had_a_window():
    for work in (Work.decode(3, 1000), Work.chunk(10, 500), Work.decode(2, 80)._replace(decode_kv_tokens=4 * 80)):
        windowed, plain = (StepCost(setting(model), Layout(kvp=4)) for model in (TOY, PLAIN))
        assert windowed.seconds(work) == plain.seconds(work)
        assert windowed.swap_seconds(160) == plain.swap_seconds(160)
    for chosen in (
        lambda how: local_threshold_tokens(how, Layout(kvp=4), 10_000_000),
        lambda how: balanced(how, Layout(pp=2)),
    ):
        assert chosen(setting(toy(6))) == chosen(setting(toy(6, visibility=EVERYTHING)))


def test_useful_work_is_that_of_the_window():
    assert attention_flops(TOY, 3.0, 1000.0) == 3 * 1100 * PAIR_FLOPS
    assert attention_flops(TOY, 3.0, 60.0) == 3 * 120 * PAIR_FLOPS
    assert attention_flops(TOY, 10.0, 510.0, causal=True) == (10 * 500 + 55 + 1000) * PAIR_FLOPS


def test_the_fullest_run_of_layers():
    lengths = np.arange(1.0, 7)
    counts = Runs("wfwffw").fullest({"f": np.array(1.0), "w": np.array(0.0)}, lengths)
    assert counts["f"].tolist() == [1, 2, 2, 3, 3, 3]
    assert counts["w"].tolist() == [0, 0, 1, 1, 2, 3]
    alone = Runs("ff").fullest({"f": np.array(1.0)}, np.array([[1.0], [2.0]]))
    assert alone["f"].tolist() == [[1], [2]]
    assert Runs("fw").fullest({"f": np.array(1.0), "w": np.array(2.0)}, np.zeros(0))["f"].shape == (0,)


def test_no_layout_takes_no_time_and_no_memory():
    none = Layouts.of([Layout()]).take(np.zeros(0, np.intp))
    assert decode_seconds(setting(TOY), none, 8.0, 1e5).shape == (0,)
    assert kv_bytes(setting(TOY), none, 8.0, 1e5).shape == weights_bytes(setting(TOY), none).shape == (0,)


def test_the_stage_with_the_most_kv_counts_whatever_comes_first():
    """Two kinds of layers that see everything, one with eight times the KV heads; then two windows beside one full."""
    (mixer,) = TOY.layers[1].mixers
    wide = msgspec.structs.replace(mixer, heads=HeadShape(16, 16))
    few = replace(TOY, layers=(TOY.layers[1], LayerSpec((wide,), TOY.layers[1].ffns)) * 2)
    one_bytes = mixer.heads.num_kv_heads * setting(few).kv_head_bytes(mixer)
    held = kv_bytes(setting(few), Layouts.of([Layout(pp=4), Layout(pp=2)]), 1.0, 1000.0)
    assert held.tolist() == [1000 * one_bytes * 16 / mixer.heads.num_kv_heads] * 1 + [
        1000 * (one_bytes + one_bytes * 16 / mixer.heads.num_kv_heads)
    ]
    windows = [msgspec.structs.replace(mixer, visibility=Visibility(window_tokens=size)) for size in (64, 4096)]
    layers = tuple(LayerSpec((one,), TOY.layers[1].ffns) for one in (mixer, windows[0], windows[1], mixer))
    held = kv_bytes(setting(replace(TOY, layers=layers)), Layouts.of([Layout(pp=2)]), 1.0, 1e5)
    assert held[0] >= (1e5 + 64) * one_bytes


@given(st.text("abc", min_size=1, max_size=12), st.data())
def test_the_fullest_run_holds_as_much_as_any(layers, data):
    runs = Runs(layers)
    lengths = np.array(data.draw(st.lists(st.integers(1, len(layers)), min_size=1, max_size=4)), np.float64)
    amounts = {kind: np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))))
               for kind in runs.kinds}  # fmt: skip
    held, counts = runs.largest_total(amounts, lengths), runs.fullest(amounts, lengths)
    assert sum(counts.values()).tolist() == lengths.tolist()
    for place, length in enumerate(lengths.astype(int)):
        pieces = [layers[start : start + length] for start in range(len(layers) - length + 1)]
        assert held[place] == max(sum(amounts[kind][place] for kind in piece) for piece in pieces)


def test_a_stage_has_the_experts_of_its_own_layers():
    """Experts in every second of four layers: one of the two layers of a stage has them."""
    moe = MoE(num_experts=5, experts_per_token=1, expert_size=24, shared_size=16)
    model = toy(4, visibility=EVERYTHING, architecture="llama4_text", moe=moe, layer_step=2)
    projections = 64 * 16 * (4 + 2 + 2) + 4 * 16 * 64
    dense, experts = 3 * 64 * 32, 3 * 64 * (5 * 24 + 16) + 5 * 64
    vocabulary = 100 * 64
    held = [weights_bytes(setting(model), layouts(pp=pp))[0] / 2 for pp in (1, 2, 4)]
    assert held[0] == 4 * projections + 2 * (dense + experts) + 2 * vocabulary
    assert held[1] == 2 * projections + dense + experts + vocabulary
    assert held[2] == projections + experts + vocabulary


@pytest.mark.parametrize(("name", "full", "window"), [("gpt-oss-120b", 18, 128), ("llama-4-maverick", 12, 8192)])
def test_presets_with_windows_keep_the_context_in_their_other_layers_alone(name, full, window):
    """18 of 36 layers, and 12 of 48; on one GPU, of 131,072 tokens."""
    how = setting(load_model(name))
    model = how.model
    token_bytes = 2 * attention_of(model).heads.num_kv_heads * attention_of(model).head_size * 2
    kept = full * 131_072 + (model.num_layers - full) * (window + 3 * 16)
    assert kv_bytes(how, layouts(), 1.0, 131_072.0)[0] == kept * token_bytes
    assert np.isfinite(decode_seconds(how, layouts(tpa=8), 4.0, 131_072.0)).all()


@pytest.mark.parametrize("name", ["gpt-oss-120b", "llama-4-maverick"])
def test_an_array_of_layouts_and_batches_costs_what_each_costs_alone(name):
    how, batches = setting(load_model(name)), np.array([1.0, 7.0])
    many = Layouts.of([Layout(tpa=2), Layout(kvp=2, tpa=4, pp=3), Layout(kvp=4, tpf=1, ep=4, pp=5)])
    block = many.as_column()
    together = decode_seconds(how, block, batches, 1e5), kv_bytes(how, block, batches, 1e5)
    for row, column in np.ndindex(3, 2):
        alone = many.take(np.array([row]))
        assert decode_seconds(how, alone, float(batches[column]), 1e5)[0] == together[0][row, column]
        assert kv_bytes(how, alone, float(batches[column]), 1e5)[0] == together[1][row, column]
        assert weights_bytes(how, alone)[0] == weights_bytes(how, block)[row, 0]
