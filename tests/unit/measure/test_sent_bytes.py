"""What a prefill sends between ranks, by hand: the built-in model has 30 layers of 576 numbers, 9 query heads of 64."""

from dataclasses import replace

import pytest

from longhelix.compute.kernels import native
from longhelix.errors import UserError
from longhelix.measure.bench import sequence_parallelism
from longhelix.measure.formulas import prefill_sent_bytes
from longhelix.measure.sequence_parallelism import VARIANTS, SequenceParallelismJob, combine, pairs
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        native.module is None, reason="bytes are multiplied by native kernels, which are not built here"
    ),
]

ROW = 576 * 2  # bytes of a row of bfloat16
EXCHANGED_ROW = 30 * 9 * (64 * 2 + 4)  # layers, query heads, an output and its LSE


@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["tpa 2", "kvp 2"])
def layout(request):
    return Layout(*request.param)


@pytest.fixture(scope="module")
def found(layout):
    return pairs("builtin", layout, VARIANTS, [64], chunk_tokens=3, sp_min_token_num=3, threads=1)


def exchanged(layout, rows):
    return EXCHANGED_ROW * rows if layout.kvp == 2 else 0


def test_without_sequence_parallelism_the_embedding_and_two_blocks_a_layer_are_summed(found, layout):
    for pair in found.values():
        expected = (1 + 2 * 30) * 2 * 5 * ROW + exchanged(layout, 5)  # an all-reduce of two ranks: the tensor from each
        assert prefill_sent_bytes(pair.off, [3, 2]) == expected


@pytest.mark.parametrize(
    ("variant", "gathered_bytes"),
    [
        ("flash-comm-v1", 60 * 4 * ROW),  # three rows and one of padding
        ("flash-comm-v1-int8", 60 * 4 * (576 + 9 * 4)),  # bytes, and a scale for each 64 of them
        ("enable-sp", 59 * 4 * ROW),  # all rows of the first norm are there
        ("enable-sp-int8", 59 * 4 * (576 + 9 * 4)),
    ],
)
def test_on_token_shards_normed_rows_and_at_the_end_hidden_states_are_gathered(found, layout, variant, gathered_bytes):
    embedding, scattered, last = 2 * 3 * ROW, 60 * 4 * ROW, 4 * ROW
    sharded = embedding + scattered + gathered_bytes + last + exchanged(layout, 3)
    assert prefill_sent_bytes(found[variant].on, [3]) == sharded
    below = prefill_sent_bytes(found[variant].off, [2])
    assert prefill_sent_bytes(found[variant].on, [3, 2, 3]) == 2 * sharded + below


@pytest.mark.parametrize("preset", ["deepseek-r1", "mixtral-8x22b"])
def test_latents_and_experts_have_no_formula(found, preset):
    config = replace(found["enable-sp"].on, spec=load_model(preset))
    assert prefill_sent_bytes(config, [3]) is None


def test_a_pair_differs_in_sequence_parallelism_alone(found):
    for variant, pair in found.items():
        off, on = pair.off.execution, pair.on.execution
        assert off.token_ranges.sp_min_tokens is None
        assert on.token_ranges.sp_min_tokens == 3
        assert on.token_ranges.flash_comm == variant.startswith("flash")
        assert replace(pair.on, execution=replace(on, token_ranges=off.token_ranges)) == pair.off
        assert pair.on.formats.activation_dtype == ("int8" if variant.endswith("int8") else None)
        assert on.mode == ("eager" if variant.startswith("flash") else "compiled")


def test_none_of_the_variants_is_refused():
    with pytest.raises(UserError, match="variants is empty"):
        pairs("builtin", Layout(tpa=2), [], [64], chunk_tokens=3)


def test_links_count_for_each_rank_and_loopback_for_both(found):
    config = found["flash-comm-v1"].on
    ranks = [{"prompt": 8, "rate_mbit": 10.0, "sent_bytes": sent} for sent in (500_000, 700_000)]
    row = combine(ranks, config)
    assert row["sharded_tokens"] == 6  # steps of 3, 3 and 2 rows
    assert row["formula_bytes"] == prefill_sent_bytes(config, [3, 3, 2])
    assert row["sent_bytes"] == 1_200_000
    assert row["over_formula"] == 1_200_000 / row["formula_bytes"]
    assert combine([rank | {"rate_mbit": None} for rank in ranks], config)["sent_bytes"] == 500_000


def test_a_variant_and_its_baseline_take_turns_at_being_first(found):
    order = []

    class Prefill:
        sent_bytes = 0

        def __init__(self, name):
            self.name = name

        def __call__(self, token_ids):
            order.append(self.name)

    pair = {"flash-comm-v1": found["flash-comm-v1"]}
    job = SequenceParallelismJob(pair, (3,), (), repeats=3)
    rows = list(job._point([Prefill("off"), Prefill("on")], None, 3))
    assert order == ["off", "on", "on", "off"] * 2
    assert [row["variant"] for row in rows] == ["off", "flash-comm-v1"]


def test_the_note_says_what_the_formula_leaves_out_and_what_passes_at_once():
    assert "The formula excludes headers and token sampling" in sequence_parallelism.NOTE
    assert "sends a burst of up to {burst_ms:g} ms at its rate" in sequence_parallelism.NOTE
