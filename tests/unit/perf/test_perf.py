"""The performance model: its invariants, and sums counted another way."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix import Layout, UserError
from longhelix.compute.kernels.candidates import Candidates
from longhelix.perf import collectives
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import total_seconds
from longhelix.perf.flops import attention_flops, model_flops
from longhelix.perf.hop_b import Overlap, pipelined_s
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, memory, weights_bytes
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.perf.step import decode_items, decode_seconds, step_items, step_seconds, token_seconds
from longhelix.perf.step_cost import StepCost
from longhelix.perf.threshold import local_threshold_tokens
from longhelix.scheduler.work import CANDIDATES, Work
from longhelix.spec.layout import HeadShape
from longhelix.spec.presets import load_model, load_system
from longhelix.spec.weights import num_active_parameters, num_parameters
from toy_model import attention_of, kv_elements, latents_of, moe_of, num_dense

pytestmark = pytest.mark.unit

GB200, H100 = load_system("gb200"), load_system("h100")
MODELS = {name: load_model(name) for name in ("deepseek-r1", "llama-3.1-405b", "llama-3-8b", "qwen3-30b-a3b")}


def setting(model="llama-3.1-405b", system=GB200, dtype="fp4"):
    return Setting(MODELS[model], system, Dtypes(dtype, dtype, dtype))


def one(**degrees):
    return Layouts.of([Layout(**degrees)])


@st.composite
def configurations(draw):
    """A model, layouts of it in one array, batch and context."""
    name = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[name]
    num_experts = moe_of(model).num_experts if moe_of(model) else 1
    local, dp, hop_b = draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 4])), draw(st.booleans())
    layouts = []
    for _ in range(draw(st.integers(1, 4))):
        tpa = draw(st.sampled_from([1, 2, 4, 8]))
        kvp = dp * draw(st.sampled_from([1, 2, 3, 8, 16]))
        num_ranks = kvp * tpa
        ep = draw(st.sampled_from([ep for ep in (1, 2, 4, 8, 64) if num_ranks % ep == 0 and ep <= num_experts]))
        layouts.append(Layout(kvp, tpa, num_ranks // ep, ep, draw(st.sampled_from([1, 2, 5]))))
    batch, context = draw(st.integers(1, 300)), draw(st.integers(1, 10**7))
    return setting(name), Layouts.of(layouts, dp=dp, local=local, hop_b=hop_b), float(batch), float(context)


@given(configurations())
def test_an_array_of_layouts_costs_what_each_costs_alone(drawn):
    how, layouts, batch, context = drawn
    together = decode_seconds(how, layouts, batch, context)
    needed = memory(how, layouts, batch, context).total_bytes
    for index in range(len(layouts)):
        alone = layouts.take(np.array([index]))
        assert decode_seconds(how, alone, batch, context)[0] == together[index]
        assert memory(how, alone, batch, context).total_bytes[0] == needed[index]


@given(configurations(), st.floats(1.01, 8))
def test_better_hardware_never_slows_a_step(drawn, factor):
    how, layouts, batch, context = drawn
    before_s = decode_seconds(how, layouts, batch, context)
    system = how.system
    known = system.constants
    rates = ("memory_bytes_per_s", "scale_up.bytes_per_s", "scale_out.bytes_per_s")
    better = (
        *({name: known[name] * factor} for name in rates),
        {name: value * factor for name, value in known.items() if name.startswith("flops_per_s.")},
        *({name: known[name] / factor} for name in ("kernel_s", "collective_s")),
    )
    for changed in better:
        faster = system.replaced(changed, "a test's")
        after_s = decode_seconds(replace(how, system=faster), layouts, batch, context)
        assert (after_s <= before_s * (1 + 1e-12)).all()


@given(configurations())
def test_parts_are_finite_and_not_negative(drawn):
    how, layouts, batch, context = drawn
    for item in decode_items(how, layouts, batch, context):
        for values in (item.seconds, item.flops, item.hbm_bytes, item.net_bytes, item.fixed_s):
            assert np.isfinite(values).all()
            assert (values >= 0).all()
        assert (item.fixed_s <= item.seconds * (1 + 1e-12)).all()


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 12), st.integers(1, 200))
def test_shares_are_those_of_the_fullest_rank_of_the_layout(kvp, num_kv_heads, group, tpa):
    heads = HeadShape(num_kv_heads * group, num_kv_heads)
    if tpa > heads.num_query_heads or kvp * tpa > 256:
        return
    layout = Layout(kvp, tpa)
    layouts, ranks = Layouts.of([layout]), range(layout.world_size)
    assert layouts.kv_heads(heads)[0] == max(len(layout.kv_heads(heads, rank)) for rank in ranks)
    assert layouts.query_heads(heads)[0] == max(len(layout.query_heads(heads, rank)) for rank in ranks)
    assert layouts.merged_query_heads(heads)[0] == max(len(layout.merged_query_heads(heads, rank)) for rank in ranks)


def test_a_stages_share_is_that_of_the_fullest_one():
    told = Layout(pp=2, stage_layers=(6, 2))
    layouts = Layouts.of([Layout(), Layout(pp=3), told])
    assert layouts.stage_layers(8).tolist() == [8, 3, 6]
    how = setting("llama-3-8b", H100, "bfloat16")
    even, uneven = (Layouts.of([Layout(pp=2, stage_layers=stages)]) for stages in (None, (30, 2)))
    for formula in (kv_bytes, decode_seconds):
        assert formula(how, uneven, 1.0, 1e6)[0] > formula(how, even, 1.0, 1e6)[0]


def divisors(number, most=64):
    return [divisor for divisor in range(1, most + 1) if number % divisor == 0]


@given(st.data(), st.sampled_from(sorted(MODELS)), st.integers(1, 64), st.integers(1, 300), st.integers(1, 10**7))
def test_kv_over_all_ranks_is_the_formula(data, name, kvp, batch, context):
    """Where heads and layers divide evenly, so that every rank is as full as the fullest."""
    model, how = MODELS[name], setting(name)
    tpa = data.draw(st.sampled_from(divisors(attention_of(model).heads.num_kv_heads)))
    layout = Layout(kvp, tpa, pp=data.draw(st.sampled_from(divisors(model.num_layers))))
    held = kv_bytes(how, Layouts.of([layout]), float(batch), float(context))[0] * layout.world_size
    assert held == pytest.approx(batch * context * kv_elements(model) * 0.5)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_gpu_holds_every_parameter_of_a_product_once(name):
    model = MODELS[name]
    held = weights_bytes(setting(name), one())[0] / 0.5
    # Norms and routing biases are not products.
    assert held == pytest.approx(num_parameters(model), rel=2e-4)
    assert held <= num_parameters(model)


def test_published_sizes():
    assert kv_bytes(setting("deepseek-r1"), one(), 1.0, 1e6)[0] == pytest.approx(17.57e9, rel=1e-3)
    assert kv_bytes(setting(), one(), 1.0, 1e6)[0] == pytest.approx(129.0e9, rel=1e-3)
    assert kv_bytes(setting(dtype="bfloat16"), one(), 1.0, 1e6)[0] == pytest.approx(516e9, rel=1e-3)


def test_decode_reads_the_weights_and_kv_of_the_rank_and_sends_the_exchange_of_the_paper():
    how, layouts = setting("llama-3-8b", H100, "bfloat16"), one(kvp=4, tpa=2)
    items = {item.name: item for item in decode_items(how, layouts, 8.0, 1e5)}
    model = how.model
    kv = (
        8
        * 1e5
        / 4
        * 2
        * model.num_layers
        * attention_of(model).heads.num_kv_heads
        / 2
        * attention_of(model).head_size
        * 2
    )
    # Of 16 heads a query and a partial output in bfloat16, and an LSE; the merge reads outputs, and writes a quarter.
    rows = model.num_layers * 8 * 16
    assert items["attention"].hbm_bytes[0] == kv + rows * (2 * 128 * 2 + 4)
    assert items["merge"].hbm_bytes[0] == rows * (128 * 2 + 4 + 128 * 2 / 4)
    products = ("QKV", "output projection", "dense FFN", "head")
    embedding = model.vocabulary.size / 8 * model.hidden_size * 2
    read = sum(items[name].hbm_bytes[0] for name in products)
    assert read == pytest.approx(weights_bytes(how, layouts)[0] - embedding)
    # B (H / TPA) (KVP - 1) / KVP elements and LSEs, a layer (Helix, section 2.1.2).
    elements = 8 * model.hidden_size / 2 * 3 / 4
    lses = 8 * attention_of(model).heads.num_query_heads / 2 * 3 / 4
    assert items["exchange"].net_bytes[0] == model.num_layers * (elements * 2 + lses * 4)


@given(configurations(), st.integers(1, 10**7))
def test_exchanged_bytes_do_not_depend_on_the_context(drawn, other):
    how, layouts, batch, context = drawn
    sent = [
        next(item for item in decode_items(how, layouts, batch, float(length)) if item.name == "exchange").net_bytes
        for length in (context, other)
    ]
    assert np.array_equal(*sent)


@given(st.sampled_from(sorted(MODELS)), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300), st.integers(1, 10**7))
def test_helix_with_one_kvp_rank_is_tensor_parallelism(name, tpa, batch, context):
    """With TPF = TPA: nothing is exchanged or merged, HOP-B changes nothing, and Wo takes the TPA share of heads."""
    how, layout = setting(name), Layout(1, tpa, tpa)
    on, off = (Layouts.of([layout], hop_b=hop_b) for hop_b in (True, False))
    items = {item.name: item for item in decode_items(how, on, float(batch), float(context))}
    assert (
        decode_seconds(how, on, float(batch), float(context))[0]
        == (decode_seconds(how, off, float(batch), float(context))[0])
    )
    for name in ("exchange", "merge"):
        assert (items[name].seconds[0], items[name].net_bytes[0]) == (0, 0)
    heads = attention_of(how.model).heads
    assert on.merged_query_heads(heads)[0] == on.query_heads(heads)[0]


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-r1"])
@pytest.mark.parametrize(("kvp", "tpa", "batch"), [(4, 2, 8), (4, 2, 10), (3, 1, 7)])
def test_an_instance_of_its_own_requests_is_tensor_parallelism_of_its_share(name, kvp, tpa, batch):
    """Priced for all requests of the world, and for one step of the instance with most."""
    given = setting(name)
    tied = Layout(kvp, tpa, tpa, ffn_replicas=kvp)
    own = math.ceil(batch / kvp)
    alone = decode_seconds(given, one(tpa=tpa), own, 1e5)
    assert decode_seconds(given, Layouts.of([tied], local=True, hop_b=False), batch, 1e5) == pytest.approx(alone)
    # As schedulers count it: KVP times the fullest rank's KV, and no parts that are exchanged.
    counted = Work.decode(own, kvp * 1e5)._replace(parts=0)
    assert StepCost(given, tied).seconds(counted) == pytest.approx(float(alone[0]))
    assert StepCost(given, tied).seconds(counted._replace(parts=1)) > float(alone[0])


def test_duplicated_kv_heads_stop_dividing_the_read():
    how = setting()
    read = [
        next(item for item in decode_items(how, one(tpa=tpa), 1.0, 1e6) if item.name == "attention").hbm_bytes[0]
        - 126 * 128 / tpa * (2 * 128 * 2 + 4)
        for tpa in (4, 8, 16, 64)
    ]
    assert read[0] == 2 * read[1]
    assert read[1] == read[2] == read[3]


@pytest.mark.parametrize(("rows", "channels", "context"), [(8.0, 576 + 512, 100.0), (512.0, 128 + 64 + 128, 0.0)])
def test_latent_attention_reads_queries_and_writes_outputs_of_its_form(rows, channels, context):
    """Decodes that are absorbed, and a chunk that attends directly: 2 bytes for each channel of a query and an output,
    4 for an LSE, beside what is read of KV."""
    how, layouts = setting("deepseek-r1"), one(kvp=2)

    def read(work):
        return next(item for item in step_items(how, layouts, work) if item.name == "attention").hbm_bytes[0]

    empty = Work(decode_rows=rows) if context else Work(chunk_rows=rows)
    assert read(empty) == 61 * rows * 128 * (channels * 2 + 4)


@pytest.mark.parametrize("link", [1.0, 1e3])
def test_what_is_merged_is_what_was_exchanged(link):
    """Latents or values of R1: as many channels in the merge as travel; latents where links are fast."""
    system = GB200.replaced({"scale_up.bytes_per_s": link * GB200.network.scale_up.bytes_per_s}, "a test's")
    how, layouts = setting("deepseek-r1", system), one(kvp=4)
    items = {item.name: item for item in decode_items(how, layouts, 64.0, 1e5)}
    sent_bytes = items["exchange"].net_bytes[0] / 61 / 64 / 128 / (3 / 4)  # of a row and head
    channels = (sent_bytes - 4) / 2
    assert channels == pytest.approx(512 if link > 1 else 128)
    assert items["merge"].hbm_bytes[0] == pytest.approx(61 * 64 * 128 * (sent_bytes + channels * 2 / 4))


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_candidates_are_gathered_as_the_engine_has_them_in_memory(rows):
    """On each of 8 ranks those of the other seven."""
    items = {item.name: item for item in decode_items(setting(), one(kvp=8), float(rows), 1e4)}
    assert items["sampling"].net_bytes[0] == pytest.approx(7 * 8 * Candidates.size(rows, CANDIDATES))


@pytest.mark.parametrize(
    ("cores", "kv_heads", "columns"),
    [
        (4, 2, 384),  # each rank has a core: the one with two of the three KV heads is the last
        (3, 1.5, 384),  # 4/3 turns: as much as 3/4 of the fullest, or all together
        (2, 1.5, 384),
        (1, 1.5, 384),
    ],
)
def test_ranks_that_take_turns_cost_what_all_of_them_do(cores, kv_heads, columns):
    """KVP 2 x TPA 2 of 9 query and 3 KV heads, on a machine of so many cores."""
    system = load_system("cpu").replaced({"cores": cores}, "made up")
    how, layouts = Setting(load_model("builtin"), system, Dtypes("bfloat16", "bfloat16")), one(kvp=2, tpa=2)
    model = how.model
    items = {item.name: item for item in decode_items(how, layouts, 1.0, 1e4)}
    layers, queries = model.num_layers, 3 * kv_heads
    read = kv_heads * 1e4 / 2 * 2 * 64 * 2 + queries * (2 * 64 * 2 + 4)
    assert items["attention"].hbm_bytes[0] == pytest.approx(layers * read)
    assert items["QKV"].hbm_bytes[0] == layers * 576 * (queries + 2 * kv_heads) * 64 * 2
    assert items["dense FFN"].hbm_bytes[0] == layers * 3 * 576 * columns * 2
    share_s = layers * read / (system.memory.bytes_per_s * system.memory.efficiency / 4)
    assert items["attention"].seconds[0] == pytest.approx(share_s + items["attention"].fixed_s[0])


def test_uneven_columns_of_ranks_that_take_turns():
    """49,152 rows of the vocabulary over 5 ranks: 9,831 on the fullest, or 9,830.4 each where they share two cores."""
    for cores, rows in ((5, 9831), (2, 9830.4)):
        system = load_system("cpu").replaced({"cores": cores}, "made up")
        how = Setting(load_model("builtin"), system, Dtypes("bfloat16", "bfloat16"))
        head = next(item for item in decode_items(how, one(kvp=5), 1.0, 1e4) if item.name == "head")
        assert head.hbm_bytes[0] == pytest.approx(rows * 576 * 2, rel=1e-9)


def stage_times(how, **degrees):
    """Seconds of a layer, of the embedding, of the head, and of a stage's host and message: of one-row steps."""
    items = {item.name: item.seconds[0] for item in decode_items(how, one(**degrees), 1.0, 1e4)}
    pp, ends = degrees.get("pp", 1), ("embedding", "head", "sampling")
    beside = items.get("stage to stage", 0.0) + items["host"]
    layers = sum(seconds for name, seconds in items.items() if name not in (*ends, "stage to stage", "host"))
    return layers, items["embedding"], items["head"] + items["sampling"], beside / pp


@pytest.mark.parametrize(("pp", "most", "last"), [(2, 16, 16), (4, 8, 8), (3, 11, 10)])
def test_the_head_counts_in_every_micro_batch(pp, most, last):
    """As many micro-batches as stages: the last stage has its layers and the head for each of them."""
    how = setting("llama-3-8b", H100, "bfloat16")
    layer = stage_times(how)[0] / 32
    _, embedding, head, beside = stage_times(how, pp=pp)
    slowest = beside + max(most * layer + embedding, last * layer + head)
    found = decode_seconds(how, one(pp=pp), float(pp), 1e4)[0]
    assert found == pytest.approx(pp * slowest)
    alone = decode_seconds(how, one(pp=pp), 1.0, 1e4)[0]
    assert alone == pytest.approx(max(pp * (most * layer + beside) + embedding + head, slowest))
    assert found > alone
    # Where the last stage has fewer layers, the head waits for nobody: as long as all stages would take with most.
    told = Layout(pp=pp, stage_layers=(most + 3, *[most] * (pp - 2), 32 - 3 - most * (pp - 1)))
    uneven = decode_seconds(how, Layouts.of([told]), float(pp), 1e4)[0]
    assert uneven == pytest.approx(pp * ((most + 3) * layer + beside) + embedding + head)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-r1"])
def test_drafts_are_rows_of_their_request(name):
    """Three rows of each of 8 requests cost what 24 requests do, but for KV, which is read once for all of them."""
    how, layouts = setting(name), one(kvp=4)
    drafted = replace(how, drafts=Drafts(2, 2.5))
    found, more = (
        {item.name: item for item in decode_items(each, layouts, batch, 1e5)}
        for each, batch in ((drafted, 8.0), (how, 24.0))
    )
    kv_read = 16 * 1e5 / 4 * how.kv_token_bytes
    for item in found:
        assert found[item].flops[0] == pytest.approx(more[item].flops[0])
        less = kv_read if item == "attention" else 0.0
        assert found[item].hbm_bytes[0] == pytest.approx(more[item].hbm_bytes[0] - less), item
        assert found[item].net_bytes[0] == pytest.approx(more[item].net_bytes[0]), item
    assert token_seconds(drafted, layouts, 8.0, 1e5)[0] == decode_seconds(drafted, layouts, 8.0, 1e5)[0] / 2.5
    assert kv_bytes(drafted, layouts, 8.0, 1e5) == kv_bytes(how, layouts, 8.0, 1e5)
    held, wider = (memory(each, layouts, batch, 1e5) for each, batch in ((drafted, 8.0), (how, 24.0)))
    assert held.activations_bytes[0] == wider.activations_bytes[0]


@pytest.mark.parametrize("batch", [1.0, 96.0])
def test_drafts_stay_with_their_request_in_its_group(batch):
    """Of 64 groups the fullest has one request, or two, with four rows each."""
    how = Setting(load_model("deepseek-r1"), load_system("gb200"), Dtypes("fp8", "fp8"))
    layouts = Layouts.of([Layout(kvp=64, ep=64)], local=True)
    own, drafted = (
        {item.name: item for item in decode_items(each, layouts, batch, 1e4)}
        for each in (how, replace(how, drafts=Drafts(3, 2.0)))
    )
    for name in ("QKV", "attention", "output projection", "norms"):
        assert drafted[name].flops[0] == 4 * own[name].flops[0]


@pytest.mark.parametrize(
    ("drafts", "accepted", "words"),
    [
        (1, 2.5, "accepted-tokens is 2.5, and a step with 1 draft tokens gives 1 to 2: set accepted-tokens"),
        (0, 1.8, "accepted-tokens is 1.8, and a step with 0 draft tokens gives 1 to 1"),
        (3, 0.9, "accepted-tokens is 0.9"),
        (3, float("nan"), "accepted-tokens is nan"),
        (-1, 1.0, "draft-tokens is -1: set it to a number from 0 to 64"),
        (65, 1.0, "draft-tokens is 65"),
    ],
)
def test_drafts_that_no_step_gives(drafts, accepted, words):
    with pytest.raises(UserError, match=words):
        replace(setting(), drafts=Drafts(drafts, accepted))


def test_batches_below_the_number_of_stages_wait_less():
    how = setting("llama-3-8b", H100, "bfloat16")
    seconds = [decode_seconds(how, one(pp=4), float(batch), 1e4)[0] for batch in (1, 2, 3, 4)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[3]


def test_figure_three_of_helix():
    assert pipelined_s(16.0, 9.6, 1) == pytest.approx(25.6)
    assert pipelined_s(2.0, 1.2, 8) == pytest.approx(17.2)
    assert overlapping(16.0, 0.0, 9.6, 0.0, share=0.0).overlapped_s(8.0)[0] == pytest.approx(17.2)


def overlapping(attention_s, attention_fixed_s, exchange_s, exchange_fixed_s, share):
    arrays = [np.array([value]) for value in (attention_s, attention_fixed_s, exchange_s, exchange_fixed_s)]
    return Overlap(*arrays, part_fixed_share=share)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 500), st.floats(0, 1))
def test_overlap_never_costs_more_than_none_and_never_less_than_either(a, c, fixed_a, fixed_c, most, share):
    together = overlapping(a, a * fixed_a, c, c * fixed_c, share).overlapped_s(float(most))[0]
    assert together <= (a + c) * (1 + 1e-12)
    assert together >= max(a, c) * (1 - 1e-12)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 64), st.floats(0, 1))
def test_the_best_parts_are_few_enough_and_no_other_power_of_two_is_faster(a, c, fixed_a, fixed_c, most, share):
    cut = overlapping(a, a * fixed_a, c, c * fixed_c, share)
    (best,) = cut.best_parts(float(most))
    assert 1 <= best <= most
    assert best == int(best)
    for parts in (1, 2, 4, 8, 16, 32, 64, most):
        if parts <= most:
            assert cut.seconds(best)[0] < cut.seconds(parts)[0] or parts >= best
            assert cut.seconds(best)[0] <= cut.seconds(parts)[0]


def test_parts_that_pay_their_fixed_costs_again_do_not_pay_off_where_latency_binds():
    a, c = 5e-6, 5e-6
    again, divided = (overlapping(a, 2e-6, c, c, share) for share in (1.0, 0.0))
    assert (again.best_parts(8.0)[0], again.overlapped_s(8.0)[0]) == (1, a + c)
    assert divided.overlapped_s(8.0)[0] < 0.7 * (a + c)


SMALL, LARGE = np.array([4e3]), np.array([1e9])


def group(size, stride=1):
    return RankGroups(np.array([float(size)]), np.array([float(stride)]))


def test_collectives_of_one_rank_cost_nothing():
    for collective in (collectives.all_reduce, collectives.all_gather, collectives.all_to_all):
        sent = collective(H100, group(1), LARGE)
        assert (sent.seconds[0], sent.net_bytes[0]) == (0, 0)


def test_small_all_reduces_are_one_shot_and_large_ones_are_not():
    plain = H100.replaced({"in_switch_reduction": False}, "a test's")
    assert collectives.all_reduce(plain, group(8), SMALL).net_bytes[0] == 7 * 4e3
    assert collectives.all_reduce(plain, group(8), LARGE).net_bytes[0] == 2 * 7 / 8 * 1e9
    assert collectives.all_reduce(H100, group(8), LARGE).net_bytes[0] == 9 / 8 * 1e9


def test_groups_within_a_domain_use_its_links_and_others_both_levels():
    inside_s, outside_s = (
        H100.fixed.collective_s + link.latency_s for link in (H100.network.scale_up, H100.network.scale_out)
    )
    inside = collectives.all_to_all(H100, group(8), LARGE)
    assert inside.seconds[0] == pytest.approx(7 / 8 * 1e9 / 450e9 + inside_s)
    strided = collectives.all_to_all(H100, group(8, stride=8), LARGE)
    assert strided.seconds[0] == pytest.approx(7 / 8 * 1e9 / 50e9 + outside_s)
    both = collectives.all_to_all(H100, group(16), LARGE)
    assert both.seconds[0] == pytest.approx(7 / 16 * 1e9 / 450e9 + inside_s + 1 / 2 * 1e9 / 50e9 + outside_s)
    ring = collectives.all_reduce(H100, group(16), LARGE)
    assert ring.net_bytes[0] == pytest.approx(9 / 8 * 1e9 + 2 * 1 / 2 * 1e9 / 8)


@pytest.mark.parametrize(("ranks", "stride", "groups"), [(4, 1, 1), (6, 1, 1), (2, 2, 2), (3, 3, 2)])
def test_processes_of_several_hosts_exchange_whole_tensors_over_one_link_per_host(ranks, stride, groups):
    """The bytes that the leader of each group sends, or all ranks, as compute/parallel/across_hosts.py counts."""
    system = load_system("cpu").replaced({"scale_up.ranks": 2, "collective_s": 0.0, "scale_up.latency_s": 0.0}, "test")
    inside, out, size_bytes = 2 if stride == 1 else 1, system.network.scale_out, 1e7
    hosts = ranks / inside
    expected = {
        # what ranks send inside of a host, rounds between hosts, and the bytes of all groups that share a host's link
        collectives.all_reduce: (size_bytes, hosts - 1, (hosts - 1) * size_bytes),
        collectives.all_gather: (size_bytes / 2, hosts - 1, (hosts - 1) / hosts * size_bytes),
        collectives.all_to_all: (size_bytes / ranks, 1, inside * (hosts - 1) / hosts * size_bytes),
    }
    for collective, (inside_bytes, rounds, out_bytes) in expected.items():
        found = collective(system, group(ranks, stride), np.array([size_bytes]))
        inside_s = inside_bytes / system.network.scale_up.bytes_per_s if inside > 1 else 0
        out_s = rounds * out.latency_s + groups * out_bytes / out.bytes_per_s
        assert found.seconds[0] == pytest.approx(inside_s + out_s)


def test_ranks_of_one_host_send_to_the_next_stage_over_one_link():
    system = load_system("cpu").replaced({"scale_up.ranks": 2, "collective_s": 0.0}, "test")
    for stride, link, senders in (
        (1, system.network.scale_up, 1),
        (2, system.network.scale_out, 2),
        (3, system.network.scale_out, 2),
    ):
        found = collectives.send(system, np.array([float(stride)]), np.array([1e6]))
        assert found.seconds[0] == pytest.approx(link.latency_s + senders * 1e6 / link.bytes_per_s)


def test_prefill_with_one_stage_is_the_sum_of_its_chunks():
    how, layouts = setting("llama-3-8b", H100, "bfloat16"), one(tpa=8)
    alone = [step_seconds(how, layouts, Work.chunk(512.0, 512.0 * i))[0] for i in range(256)]
    first_token = step_seconds(how, layouts, Work.chunk(1.0, 0.0) + Work(sampled_rows=1.0))[0]
    first_token -= step_seconds(how, layouts, Work.chunk(1.0, 0.0))[0]
    assert prefill_seconds(how, layouts, 512.0 * 256, 512.0)[0] == pytest.approx(sum(alone) + first_token, rel=1e-4)


def test_stages_divide_a_prefill_and_not_a_decode():
    how = setting("llama-3-8b", H100, "bfloat16")
    stages = Layouts.of([Layout(tpa=8, pp=pp) for pp in (1, 2, 4, 8, 16)])
    prefill_s = prefill_seconds(how, stages, 1e6, 2048.0)
    efficiency = prefill_s[0] / prefill_s / stages.pp
    assert (efficiency >= 0.8).all()
    assert (np.diff(efficiency) < 0).all()
    assert (np.diff(decode_seconds(how, stages, 1.0, 1e6)) > 0).all()


def test_kvp_divides_the_attention_of_decode_alone():
    how = setting("llama-3-8b", H100, "bfloat16")
    tied = [
        {item.name: item for item in decode_items(how, one(kvp=kvp, tpa=8, tpf=8, ffn_replicas=kvp), 1.0, 1e7)}
        for kvp in (1, 4)
    ]
    # Beside the queries and outputs of 4 heads, which all ranks have.
    memory_bytes_per_s = H100.memory.bytes_per_s * H100.memory.efficiency
    rest_s = tied[0]["attention"].fixed_s[0] + 32 * 4 * (2 * 128 * 2 + 4) / memory_bytes_per_s
    assert tied[0]["attention"].seconds[0] - rest_s == pytest.approx(4 * (tied[1]["attention"].seconds[0] - rest_s))
    for name in ("QKV", "dense FFN", "all-reduce after FFN"):
        assert tied[0][name].seconds[0] == tied[1][name].seconds[0]


def test_mixed_batches_cost_less_than_apart_and_more_than_either():
    how, layouts = setting("llama-3-8b", H100, "bfloat16"), one(tpa=8)
    chunk, decodes = Work.chunk(512.0, 1e5), Work.decode(64.0, 1e3)
    apart = [step_seconds(how, layouts, work)[0] for work in (chunk, decodes)]
    mixed = step_seconds(how, layouts, chunk + decodes)[0]
    assert max(apart) < mixed < sum(apart)


def test_latent_attention_of_a_large_chunk_is_direct_and_of_a_small_one_absorbed():
    how, layouts = setting("deepseek-r1", GB200, "bfloat16"), one(kvp=1, tpa=8)

    def flops(rows):
        items = step_items(how, layouts, Work.chunk(rows, 1e5))
        return next(item for item in items if item.name == "attention").flops[0]

    mla, heads, layers = latents_of(how.model), 16, how.model.num_layers

    def absorbed(rows):
        return layers * 2 * heads * (mla.cached_size + mla.kv_lora_rank) * rows * (1e5 + (rows + 1) / 2)

    def direct(rows):
        expanded = (1e5 + rows) * mla.kv_lora_rank * (mla.nope_size + mla.value_size)
        attended = rows * (1e5 + (rows + 1) / 2) * (mla.nope_size + mla.rope_size + mla.value_size)
        return layers * 2 * heads * (expanded + attended)

    for rows in (16.0, 170.0):
        assert flops(rows) == pytest.approx(absorbed(rows))
    for rows in (171.0, 8192.0):
        assert flops(rows) == pytest.approx(direct(rows))
    assert absorbed(171.0) == pytest.approx(direct(171.0), rel=0.01)
    assert direct(8192.0) < absorbed(8192.0) / 2


def test_a_row_reads_few_experts_and_many_rows_all():
    how = setting("deepseek-r1")
    read = [
        next(item for item in decode_items(how, one(kvp=8), batch, 1e3) if item.name == "experts").hbm_bytes[0]
        for batch in (1.0, 4096.0)
    ]
    moe, layers = moe_of(how.model), how.model.num_layers - num_dense(how.model)
    expert = 3 * how.model.hidden_size * moe.expert_size / 8 * 0.5
    assert read[0] == pytest.approx(layers * moe.experts_per_token * expert)
    assert read[1] == pytest.approx(layers * moe.num_experts * expert, rel=1e-6)


def test_useful_flops_are_the_conventions_of_the_papers():
    llama = load_model("llama-3-70b")
    # 4 n^2 d h_q L + 2 P n: 2.76e18 at n = 1e6 (arXiv 2409.17264, not causal).
    assert model_flops(llama, 1e6, 1e6) == pytest.approx(2.76e18, rel=0.01)
    full, causal = (attention_flops(llama, 1e6, 1e6, causal=causal) for causal in (False, True))
    assert causal == pytest.approx(full / 2, rel=1e-5)
    assert num_active_parameters(MODELS["deepseek-r1"]) == pytest.approx(36.6e9, rel=0.02)


COSTS = [
    (model, system, layout)
    for model in ("llama-3-8b", "llama-3.1-405b", "deepseek-r1")
    for system in ("cpu", "h100", "gb200")
    for layout in (Layout(), Layout(kvp=2), Layout(kvp=4, tpa=2), Layout(kvp=2, tpa=2, ffn_replicas=2))
]


@pytest.mark.parametrize(("model", "system", "layout"), COSTS)
def test_a_steps_cost_in_plain_numbers_is_that_of_arrays_to_the_bit(model, system, layout):
    how = setting(model, load_system(system), "bfloat16")
    cost, layouts = StepCost(how, layout), Layouts.of([layout], hop_b=False)
    chance = np.random.default_rng(1)
    for _ in range(50):
        decodes, rows, parts = (int(chance.choice(counts)) for counts in ((0, 1, 9, 256), (0, 1, 77, 512), (1, 2, 8)))
        prefix = int(chance.integers(10**6))
        chunk = Work.chunk(rows, prefix) if rows else Work()
        work = Work.decode(decodes, int(chance.integers(10**6))) + chunk
        work = work._replace(parts=parts)
        assert cost.seconds(work) == step_seconds(how, layouts, work)[0]
        assert cost.by_parts(work._replace(parts=3))(parts) == cost.seconds(work)


def test_a_step_costs_what_its_own_number_of_parts_takes():
    how = setting("llama-3-8b", load_system("cpu").replaced({"scale_up.ranks": 1}, "test"), "bfloat16")
    cost, decodes = StepCost(how, Layout(kvp=2)), Work.decode(8, 1_000_000)
    best = step_seconds(how, Layouts.of([Layout(kvp=2)], hop_b=True), decodes)[0]
    seconds = {parts: cost.seconds(decodes._replace(parts=parts)) for parts in (1, 2, 4, 8)}
    assert len(set(seconds.values())) == 4
    assert min(seconds.values()) == best <= seconds[1]


def test_a_swap_takes_its_bytes_both_ways():
    """On a GPU of its own at its own bandwidth; on one machine, of whose disk each of two ranks has half."""
    block_bytes = 16 * 2 * 8 * 128 * 2 * 32  # tokens, K and V, heads, channels, bytes, layers
    for kvp, name, share in ((1, "h100", 1), (2, "h100", 1), (1, "cpu", 1), (2, "cpu", 2)):
        system = load_system(name)
        cost = StepCost(setting("llama-3-8b", system, "bfloat16"), Layout(kvp=kvp))
        assert cost.swap_seconds(16) == pytest.approx(2 * share * block_bytes / system.memory.swap_bytes_per_s)


def test_a_move_is_read_sent_and_written():
    """Over NVLink inside a server, over the network's link between servers: at the rate of the rank that has most."""
    system = load_system("h100")
    token_bytes = 2 * 8 * 128 * 2 * 32  # K and V, heads, channels, bytes, layers
    for tpa, heads, link in ((1, 8, system.network.scale_up), (8, 1, system.network.scale_out)):
        cost = StepCost(setting("llama-3-8b", system, "bfloat16"), Layout(kvp=2, tpa=tpa))
        half_s = cost.move_seconds(500, 300, 16)
        travels_s = 500 * 16 * token_bytes * heads / 8 / link.bytes_per_s
        memory_bytes_per_s = system.memory.bytes_per_s * system.memory.efficiency
        copied_s = 800 * (
            2 * 16 * token_bytes * heads / 8 / memory_bytes_per_s + 32 * system.fixed.kernel_s
        )  # by layer
        assert cost.move_seconds(1000, 600, 16) - half_s == pytest.approx(travels_s + copied_s)
        assert 0 < half_s - travels_s - copied_s < 1e-4  # the collective


def test_requests_on_one_rank_count_as_often_as_there_are_ranks():
    layouts = Layouts.of([Layout(kvp=4)] * 2, local=True)
    work = layouts.decode(5.0, 1000.0) + layouts.chunk(8.0, 100.0)
    assert work.decode_kv_tokens.tolist() == [4 * 2 * 1000.0] * 2  # two of them on one rank
    assert work.chunk_pairs.tolist() == [4 * 8 * (100 + 9 / 2)] * 2
    own = layouts.of_rank(work)
    assert (own.decode_rows[0], own.decode_kv_tokens[0], own.chunk_kv_tokens[0]) == (2, 2000, 108)
    even = Layouts.of([Layout(kvp=4)])
    assert even.decode(5.0, 1000.0) + even.chunk(8.0, 100.0) == Work.decode(5.0, 1000.0) + Work.chunk(8.0, 100.0)


ATTENTION = ("QKV", "RoPE and KV write", "attention", "exchange", "merge", "output projection",
             "all-reduce after attention")  # fmt: skip


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("dp", "kvp", "tpa"), [(2, 4, 1), (4, 2, 2), (3, 2, 2)])
def test_a_group_attends_as_a_layout_of_its_ranks_alone(name, dp, kvp, tpa):
    """With its share of the requests; experts compute and read what those of one group of all ranks do."""
    if tpa > attention_of(MODELS[name]).heads.num_kv_heads:
        tpa = 1
    how, ranks = setting(name), dp * kvp * tpa
    groups = Layouts.of([Layout(dp * kvp, tpa, ranks)], dp=dp)
    found, alone, one_group = (
        {item.name: item for item in decode_items(how, layouts, batch, 1e5)}
        for layouts, batch in (
            (groups, 5.0 * dp),
            (one(kvp=kvp, tpa=tpa), 5.0),
            (one(kvp=dp * kvp, tpa=tpa, tpf=ranks), 5.0 * dp),
        )
    )
    for item in ATTENTION:
        for measure in ("seconds", "flops", "hbm_bytes", "net_bytes"):
            assert getattr(found[item], measure) == getattr(alone[item], measure), (item, measure)
    for item in {"dense FFN", "experts"} & found.keys():
        assert (found[item].flops, found[item].hbm_bytes) == (one_group[item].flops, one_group[item].hbm_bytes)
    held, alone_held = kv_bytes(how, groups, 5.0 * dp, 1e5)[0], kv_bytes(how, one(kvp=kvp, tpa=tpa), 5.0, 1e5)[0]
    assert held == alone_held
    assert kv_bytes(how, groups, 5.0 * dp - 1, 1e5)[0] == held  # one of the groups has five


def test_rows_of_groups_go_to_experts_once_and_are_whole_again_after_them():
    """Of 5 rows in each of 2 groups of 4 ranks every rank sends at most 2 to experts on 8 ranks, and gets them back."""
    how = setting("deepseek-r1")
    layouts = Layouts.of([Layout(8, 1, 1, 8)], dp=2)
    items = {item.name: item for item in decode_items(how, layouts, 10.0, 1e5)}
    row, moe, layers = 7168 * 2, moe_of(how.model), 58
    sent = 2 * row * 8 * (1 - (1 - 1 / 8) ** moe.experts_per_token) * 7 / 8
    # Dense layers gather 10 rows on all ranks, and scatter the sums.
    dense = 3 * 10 * row / 2, 3 * (10 * row * 7 / 8 + 5 * row * 3 / 4)
    assert items["gather before FFN"].net_bytes[0] == pytest.approx(layers * sent + dense[0])
    assert items["all-reduce after FFN"].net_bytes[0] == pytest.approx(layers * (sent + 5 * row * 3 / 4) + dense[1])


def test_groups_that_share_nothing_step_alone():
    given, tied = setting(), Layout(8, 2, 2, ffn_replicas=8)
    groups = Layouts.of([tied], dp=8, hop_b=False)
    assert decode_seconds(given, groups, 16.0, 1e5)[0] == decode_seconds(given, one(tpa=2), 2.0, 1e5)[0]


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-r1"])
@pytest.mark.parametrize("kvp", [2, 4])
def test_the_threshold_is_where_a_request_alone_loses_a_twentieth(model, kvp):
    how, layout = setting(model, H100, "bfloat16"), Layout(kvp=kvp, tpa=1)
    tokens = local_threshold_tokens(how, layout, 10_000_000)
    layouts = Layouts.of([layout], hop_b=False)

    def loss(length):
        """What KVP times the attention adds, from the step's own cost items."""
        alone, spread = (decode_seconds(how, layouts, 1.0, float(n))[0] for n in (kvp * length, length))
        return alone / spread - 1

    assert 0 < tokens < 10_000_000
    assert loss(tokens) <= 0.05 < loss(tokens + 1)
    assert local_threshold_tokens(how, layout, tokens // 2) == tokens // 2
    assert local_threshold_tokens(how, Layout(kvp=2 * kvp, tpa=1), 10_000_000) < tokens


def test_fp4_on_hardware_without_it_is_refused():
    with pytest.raises(
        UserError, match="the system h100 has no arithmetic in fp4, in which weights are: set --weight-dtype"
    ):
        setting("llama-3-8b", H100, "fp4")


def test_parts_add_up_to_the_step():
    how, layouts = setting(), one(kvp=8, tpa=8)
    assert total_seconds(decode_items(how, layouts, 4.0, 1e6))[0] == decode_seconds(how, layouts, 4.0, 1e6)[0]
