"""Attention to chosen tokens: a toy whose indexer, keys and reads are counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from longhelix.perf import collectives
from longhelix.perf.collectives import RankGroups
from longhelix.perf.flops import attention_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, weights_bytes
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.perf.step import decode_items, decode_seconds, step_items, step_seconds
from longhelix.perf.step_cost import StepCost
from longhelix.perf.threshold import local_threshold_tokens
from longhelix.scheduler.work import Work
from longhelix.spec import MLA, Indexer, ModelSpec, Visibility
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from toy_model import toy_model

pytestmark = pytest.mark.unit

LATENTS = MLA(q_lora_rank=24, kv_lora_rank=16, nope_size=12, rope_size=8, value_size=14)
# Three layers, whose rows attend to 100 tokens, which 5 heads of 10 channels choose.
SIZES = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_query_heads": 4,
    "num_kv_heads": 1,
    "head_size": 20,
    "ffn_size": 32,
    "vocab_size": 100,
    "max_positions": 4096,
    "dtype": "bfloat16",
    "mla": LATENTS,
}
TOY = toy_model("deepseek_v32", **SIZES, visibility=Visibility(indexer=Indexer(5, 10, 100)))
DENSE = toy_model("deepseek_v3", **SIZES)
KEY_BYTES = 10 + 4  # FP8, and one scale
LATENT_BYTES = (16 + 8) * 2
ROW_BYTES = (16 + 8 + 16) * 2 + 4  # of one head: its query, its output, its LSE
LATENT_FLOPS = 2 * 4 * (16 + 8 + 16)  # of a pair, absorbed, of four heads
INDEX_FLOPS = 2 * 5 * 10


def setting(model: ModelSpec = TOY, system: str = "h100") -> Setting:
    return Setting(model, load_system(system), Dtypes("bfloat16", "bfloat16"))


def layouts(*, local: bool = False, **degrees) -> Layouts:
    return Layouts.of([Layout(**degrees)], local=local)


def by_name(items):
    return {item.name: item for item in items}


@pytest.mark.parametrize(
    ("degrees", "requests", "shared"),
    [({}, 3, 1), ({"kvp": 4}, 3, 4), ({"kvp": 4, "local": True}, 1, 1), ({"tpa": 2}, 3, 1)],
)
def test_decodes_score_every_token_and_attend_to_the_chosen_ones(degrees, requests, shared):
    """`requests` of a rank, of whose tokens it has one part of `shared`; two TPA ranks score the same."""
    items = by_name(decode_items(setting(), layouts(**degrees), 3.0, 1000.0))
    scored, chosen = requests * 1000 / shared, requests * 100 / shared
    assert items["indexer"].flops[0] == 3 * scored * INDEX_FLOPS
    assert items["indexer"].hbm_bytes[0] == pytest.approx(3 * scored * (KEY_BYTES + 4))
    assert items["top-k"].hbm_bytes[0] == 3 * scored * 4
    sharers = degrees.get("tpa", 1)
    rows_bytes = requests * 4 / sharers * ROW_BYTES
    assert items["attention"].hbm_bytes[0] == 3 * (chosen * LATENT_BYTES + rows_bytes)
    assert items["attention"].flops[0] == 3 * chosen * LATENT_FLOPS / sharers


@pytest.mark.parametrize("context", [1.0, 60.0, 100.0])
def test_attention_to_a_short_context_is_that_of_the_dense_model(context):
    sparse, dense = (by_name(decode_items(setting(model), layouts(kvp=2), 3.0, context)) for model in (TOY, DENSE))
    for name in dense:
        assert sparse[name].seconds[0] == dense[name].seconds[0]
    assert set(sparse) - set(dense) == {"indexer projections", "indexer", "top-k", "candidates", "top-k of all"}


def test_every_row_of_a_prompt_gathers_its_own_tokens():
    """Ten rows after 500: they score 500 and themselves, and read 100 each, absorbed whatever their number."""
    items = by_name(step_items(setting(), layouts(kvp=4), layouts(kvp=4).chunk(10.0, 500.0)))
    assert items["indexer"].flops[0] == pytest.approx(3 * (10 * 500 + 55) * INDEX_FLOPS / 4)
    assert items["indexer"].hbm_bytes[0] == pytest.approx(3 * (510 * KEY_BYTES + 5055 * 4) / 4)
    assert items["attention"].hbm_bytes[0] == 3 * 10 * (100 * LATENT_BYTES / 4 + 4 * ROW_BYTES)
    assert items["attention"].flops[0] == 3 * 10 * 100 * LATENT_FLOPS / 4
    many = layouts().chunk(1000.0, 10_000.0)
    assert by_name(step_items(setting(), layouts(), many))["attention"].flops[0] == 3 * 1000 * 100 * LATENT_FLOPS
    assert by_name(step_items(setting(DENSE), layouts(), many))["attention"].flops[0] != pytest.approx(
        3 * (1000 * 10_000 + 500_500) * LATENT_FLOPS
    )


def test_the_best_of_all_ranks_are_gathered_with_their_scores():
    """A rank's best 100 of each row, or all that it has; eight bytes each."""
    system = load_system("h100")
    for context, candidates in ((1000.0, 100), (200.0, 50)):
        items = by_name(decode_items(setting(), layouts(kvp=4, tpa=2), 3.0, context))
        size_bytes = np.array([4.0 * 3 * candidates * 8])
        sent = collectives.all_gather(system, RankGroups(np.array([4.0]), np.array([2.0])), size_bytes)
        assert items["candidates"].seconds[0] == pytest.approx(3 * sent.seconds[0])
        assert items["candidates"].net_bytes[0] == 3 * sent.net_bytes[0]
        assert items["top-k of all"].hbm_bytes[0] == 3 * size_bytes[0]
    for alone in (layouts(tpa=4), layouts(kvp=4, local=True)):
        items = by_name(decode_items(setting(), alone, 4.0, 1000.0))
        assert items["candidates"].seconds[0] == items["top-k of all"].seconds[0] == 0


def test_every_rank_has_the_whole_indexer_and_its_share_of_the_keys():
    numbers = 5 * 10 * 24 + (10 + 5) * 64
    for degrees in ({}, {"kvp": 4}, {"tpa": 2}):
        more = [weights_bytes(setting(model), layouts(**degrees))[0] for model in (TOY, DENSE)]
        assert more[0] - more[1] == 3 * numbers * 2
    items = by_name(decode_items(setting(), layouts(kvp=4), 8.0, 1000.0))
    assert items["indexer projections"].flops[0] == 3 * 2 * 8 * numbers
    assert kv_bytes(setting(), layouts(kvp=4), 3.0, 1000.0)[0] == 3 * 3 * 1000 * (LATENT_BYTES + KEY_BYTES) / 4
    assert kv_bytes(setting(), layouts(tpa=2), 3.0, 1000.0)[0] == 3 * 3 * 1000 * (LATENT_BYTES + KEY_BYTES)
    assert setting().kv_token_bytes == 3 * (LATENT_BYTES + KEY_BYTES)


def test_systems_without_fp8_score_in_bfloat16():
    assert setting(system="h100").indexes_in == "fp8"
    assert setting(system="a100").indexes_in == "bfloat16"


def test_useful_work_is_that_of_scores_and_chosen_tokens():
    channels = 20 + 14  # direct
    assert attention_flops(TOY, 3.0, 1000.0) == 3 * (3 * 100 * 2 * 4 * channels + 3 * 1000 * INDEX_FLOPS)
    assert attention_flops(TOY, 3.0, 60.0) == 3 * 3 * 60 * (2 * 4 * channels + INDEX_FLOPS)


@pytest.mark.parametrize("work", [Work.decode(3, 1000), Work.decode(3, 60), Work.chunk(10, 500)])
def test_schedulers_price_what_is_chosen_of_kv_that_is_spread_evenly(work):
    found = StepCost(setting(), Layout(kvp=4), even=True).seconds(work)
    assert found == step_seconds(setting(), Layouts.of([Layout(kvp=4)], hop_b=False), work)[0]


def test_at_a_million_tokens_the_preset_reads_less_and_keeps_more_than_the_dense_model():
    sparse, dense = (
        Setting(load_model(name), load_system("gb300"), Dtypes("fp8", "fp8"))
        for name in ("deepseek-v3.2", "deepseek-r1")
    )
    eight = layouts(kvp=8, tpf=8)
    assert decode_seconds(sparse, eight, 4.0, 1e6)[0] < decode_seconds(dense, eight, 4.0, 1e6)[0]
    assert decode_seconds(sparse, eight, 4.0, 4096.0)[0] > decode_seconds(dense, eight, 4.0, 4096.0)[0]
    # A latent of 576 in FP8 has a scale of four bytes here, and a key 132.
    assert sparse.kv_token_bytes == dense.kv_token_bytes + 61 * 132


def test_an_array_of_layouts_and_batches_costs_what_each_costs_alone():
    batches = np.array([1.0, 7.0])
    many = Layouts.of([Layout(tpa=2), Layout(kvp=2, tpa=2, pp=3), Layout(kvp=4, tpf=4)])
    together = decode_seconds(setting(), many.as_column(), batches, 1e4)
    for row, column in np.ndindex(3, 2):
        alone = many.take(np.array([row]))
        assert decode_seconds(setting(), alone, float(batches[column]), 1e4)[0] == together[row, column]


@pytest.mark.parametrize("degrees", [{}, {"kvp": 4}])
def test_every_draft_is_scored_against_all_keys_and_reads_its_own(degrees):
    drafted = replace(setting(), drafts=Drafts(3, 2.0))
    own, four = (by_name(decode_items(how, layouts(**degrees), 3.0, 1000.0)) for how in (setting(), drafted))
    for name in ("indexer", "attention"):
        assert four[name].flops[0] == 4 * own[name].flops[0]
    assert four["top-k"].hbm_bytes[0] == 4 * own["top-k"].hbm_bytes[0]
    shared = degrees.get("kvp", 1)
    keys, pairs = 3 * 1000 / shared, 4 * 3 * 1000 / shared
    assert four["indexer"].hbm_bytes[0] == pytest.approx(3 * (keys * KEY_BYTES + pairs * 4))


def test_schedulers_price_all_chosen_tokens_on_one_rank_where_they_may_be_there():
    """Requests on one of eight ranks alone, whose KV `Work` counts eight times: a long one, and a short one."""
    scheduled, eight = setting().as_scheduled(even=False), layouts(kvp=8)
    for held, chosen in ((1e6, 100), (60.0, 60)):
        work = Work.decode(1, held)._replace(decode_kv_tokens=8 * held)
        items = by_name(step_items(scheduled, eight, work))
        assert items["attention"].hbm_bytes[0] == 3 * (chosen * LATENT_BYTES + 4 * ROW_BYTES)
        assert items["indexer"].flops[0] == 3 * held * INDEX_FLOPS


def test_requests_that_decode_together_read_no_more_than_there_is_nor_than_is_chosen():
    """A request of 10 tokens and one of 1,000 are priced for 200; they read 110."""
    work = Work.decode(1, 10) + Work.decode(1, 1000)
    found = by_name(step_items(setting().as_scheduled(even=True), layouts(), work))["attention"]
    assert found.hbm_bytes[0] == 3 * (2 * 100 * LATENT_BYTES + 2 * 4 * ROW_BYTES)


def test_a_request_may_be_longer_on_one_rank_where_its_rows_attend_to_chosen_tokens():
    """What one rank loses is the scores of all keys, and no longer the attention to them."""
    how = Setting(load_model("deepseek-v3.2"), load_system("gb200"), Dtypes("fp8", "fp8"))
    dense = Setting(load_model("deepseek-r1"), load_system("gb200"), Dtypes("fp8", "fp8"))
    sparse_tokens, dense_tokens = (local_threshold_tokens(each, Layout(kvp=8), 10_000_000) for each in (how, dense))
    assert sparse_tokens > 2048
    assert sparse_tokens > dense_tokens
