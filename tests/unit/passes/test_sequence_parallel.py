"""The pass on many kinds of graphs: what it finds, how it changes them, and that results stay the same."""

import pytest
import torch
from lockstep import Lockstep, group_of
from modules import Biased, Chain, Experts, H, LayerNorms, PostNorms, Returned, Scaled, Shared, rows

from tiers import few

pytestmark = pytest.mark.unit

HOW = (None, "static int8", "dynamic int8", "static fp8", "dynamic fp8")
SUFFIX = {
    None: "",
    "static int8": "StaticINT8",
    "dynamic int8": "DynamicINT8",
    "static fp8": "StaticFP8",
    "dynamic fp8": "DynamicFP8",
}
# Quantised numbers may differ by one step of the narrow type if two sums differ in their last bit.
TOLERANCE = {None: 1e-5, "int8": 0.03, "fp8": 0.1}


def edges(size):
    return sorted({1, size - 1, size, size + 1, 13, 1000, 1001})


def near(one, other, how=None):
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    assert one.stride() == other.stride()
    tolerance = TOLERANCE[how and how.split()[-1]]
    assert (one - other).abs().max() <= tolerance * other.abs().max()


def same_numbers(outcome, expected, how=None):
    """Check that ranks return what they return without the pass, and what one rank with the whole model returns."""
    for changed, plain in zip(outcome.changed.returned, outcome.plain.returned, strict=True):
        for one, other, alone in zip(changed, plain, expected, strict=False):
            near(one, other, how)
            near(one, alone, how)


def found(outcome):
    return {name: count for name, count in outcome.report["patterns"].items() if count}


def check_counts(outcome, size, tokens, sums, how, quantised, given=0):
    """sums: number of all-reduces, which all become reduce-scatters. quantised: number of quantised all-gathers."""
    share = -(-tokens // size)
    scaled = how is not None and how.startswith("dynamic")
    gathers = outcome.changed.collectives["all_gather"] - (quantised if scaled else 0)
    assert outcome.plain.collectives == {"all_reduce": sums} | ({"all_gather": given} if given else {})
    assert outcome.changed.collectives["all_reduce"] == 0
    assert outcome.changed.collectives["reduce_scatter"] == sums
    narrow = {None: "float32", "int8": "int8", "fp8": "uint8"}[how and how.split()[-1]]
    wide = gathers - quantised
    sent = {
        ("reduce_scatter", "float32"): sums * share * H * 4 * (size - 1),
        ("all_gather", "float32"): wide * share * H * 4 * (size - 1) + scaled * quantised * share * 4 * (size - 1),
    }
    if how is not None:
        sent["all_gather", narrow] = quantised * share * H * (size - 1)
    assert outcome.changed.sent_bytes == sent
    assert outcome.report["collectives"]["before"] == dict(outcome.plain.collectives)
    assert outcome.report["collectives"]["after"] == dict(outcome.changed.collectives)


def check_chain(size, dynamic, how, tokens_of, layers=3):
    with group_of(size):
        alone = Chain(0, 1, layers, how)
        ranks = Lockstep([Chain(rank, size, layers, how) for rank in range(size)], dynamic, min_tokens=1)
        for tokens in tokens_of:
            x = rows(tokens)
            outcome = ranks(x)
            same_numbers(outcome, [alone(x)], how)
            names = ("FirstAllReduceRMSNorm", "MiddleAllReduceRMSNorm")
            expected = {name + SUFFIX[how]: count for name, count in zip(names, (1, layers - 1), strict=True)}
            assert found(outcome) == expected | {"LastAllReduceRMSNorm": 1}
            check_counts(outcome, size, tokens, layers + 1, how, layers if how else 0)


@pytest.mark.parametrize(
    ("size", "dynamic"), few([(3, True), (2, False), (2, True), (3, False), (4, False), (4, True)], 2)
)
def test_reduced_and_normed(size, dynamic):
    check_chain(size, dynamic, None, edges(size))


@pytest.mark.parametrize("how", few(HOW[1:]))
@pytest.mark.parametrize("size", few([2, 3]))
def test_quantised_before_the_gather(size, how):
    check_chain(size, True, how, (1, size + 1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_quantised_at_all_edges(size, dynamic, how):
    check_chain(size, dynamic, how, edges(size))


@pytest.mark.parametrize("how", few(["dynamic int8", None]))
@pytest.mark.parametrize(("size", "dynamic"), few([(2, False), (3, True), (4, True)]))
def test_deepstack_is_added_on_shards(size, dynamic, how):
    with group_of(size):
        alone = Chain(0, 1, how=how)
        ranks = Lockstep([Chain(rank, size, how=how) for rank in range(size)], dynamic, min_tokens=1)
        for tokens in (1, size + 1, 13):
            inputs = rows(tokens), rows(tokens, seed=1), rows(tokens, seed=2)
            outcome = ranks(*inputs)
            same_numbers(outcome, [alone(*inputs)], how)
            assert found(outcome) == {
                "FirstAllReduceRMSNorm" + SUFFIX[how]: 1,
                "Qwen3VLMiddleAllReduceRMSNorm" + SUFFIX[how]: 2,
                "LastAllReduceRMSNorm": 1,
            }
            check_counts(outcome, size, tokens, 4, how, 3 if how else 0)


@pytest.mark.parametrize("how", few(["dynamic int8", None]))
@pytest.mark.parametrize("deepstack", few([1, 0]))
@pytest.mark.parametrize(("size", "dynamic"), few([(2, False), (3, True), (4, True)]))
def test_experts_on_shards(size, dynamic, deepstack, how):
    """All-gathers that are cut to the rank's rows again, and norms of all-gathered values."""
    layers = 3
    with group_of(size):
        alone = Experts(0, 1, layers, how)
        modules_of = [Experts(rank, size, layers, how) for rank in range(size)]
        ranks = Lockstep(modules_of, dynamic, alike=False, min_tokens=1, own_chunks=True)
        for tokens in (1, size + 1, 13):
            inputs = [rows(tokens, seed=seed) for seed in range(deepstack + 1)]
            outcome = ranks(*inputs)
            same_numbers(outcome, [alone(*inputs)], how)
            gathered = {
                "Qwen3VLMiddleLayerAllgatherAddRMSNorm" + SUFFIX[how]: deepstack,
                "MiddleLayerAllgatherAddRMSNorm" + SUFFIX[how]: layers - 1 - deepstack,
                "LastLayerAllgatherRMSNorm": 1,
            }
            reduced = {"MiddleAllReduceRMSNorm": layers, "AllGatherChunkNoOp": layers}
            assert found(outcome) == {name: count for name, count in (gathered | reduced).items() if count}
            # Experts need no gather: only the gathers of attention and the last one remain.
            share = -(-tokens // size)
            assert outcome.plain.collectives == {"all_reduce": layers, "all_gather": layers}
            scales = layers - 1 if how else 0
            assert outcome.changed.collectives == {"reduce_scatter": layers, "all_gather": layers + scales}
            wide = 1 if how else layers
            sent = wide * share * H * 4 * (size - 1) + scales * share * 4 * (size - 1)
            assert outcome.changed.sent_bytes["all_gather", "float32"] == sent
            if how:
                assert outcome.changed.sent_bytes["all_gather", "int8"] == scales * share * H * (size - 1)


@pytest.mark.parametrize(("size", "dynamic"), few([(3, True), (2, False), (3, False), (4, True)]))
def test_a_residual_that_is_no_sum(size, dynamic):
    """Each rank adds its own rows of the residual, not the first rows."""
    with group_of(size):
        alone = Chain(0, 1, given=True)
        ranks = Lockstep([Chain(rank, size, given=True) for rank in range(size)], dynamic, min_tokens=1)
        for tokens in edges(size):
            x = rows(tokens)
            outcome = ranks(x)
            same_numbers(outcome, [alone(x)])
            assert found(outcome) == {"MiddleAllReduceRMSNorm": 2, "LastAllReduceRMSNorm": 1}


@pytest.mark.parametrize("size", [2, 3])
def test_outputs_and_buffers_have_all_tokens(size):
    with group_of(size):
        alone = Returned(0, 1)
        expected = alone(rows(13))
        outcome = Lockstep([Returned(rank, size) for rank in range(size)], min_tokens=1)(rows(13))
        assert found(outcome) == {"FirstAllReduceRMSNorm": 1, "MiddleAllReduceRMSNorm": 3}
        copies = len(outcome.plain.returned[0]) - 2  # outputs of the graphs for buffers that they change
        for changed, plain in zip(outcome.changed.returned, outcome.plain.returned, strict=True):
            for one, other in zip(changed, plain, strict=True):
                near(one, other)
            for one, other in zip(changed[copies:], expected, strict=True):
                near(one, other)


@pytest.mark.parametrize("dynamic", few([True, False]))
@pytest.mark.parametrize(("module", "stay"), [(PostNorms, 0), (Scaled, 0), (Shared, 1), (Biased, 0)])
def test_modules_that_others_do_not_match(module, stay, dynamic):
    """Gathering two norms of one sum would send more bytes than the all-reduce, so the all-reduce stays."""
    with group_of(3):
        alone = module(0, 1)
        ranks = Lockstep([module(rank, 3) for rank in range(3)], dynamic, min_tokens=1)
        for tokens in (1, 4, 13):
            x = rows(tokens)
            outcome = ranks(x)
            same_numbers(outcome, [alone(x)])
            assert outcome.changed.collectives["all_reduce"] == stay == len(outcome.explained.splitlines())
            assert sum(found(outcome).values()) == outcome.plain.collectives["all_reduce"] - stay


def test_layer_norms_are_left_alone(caplog):
    with group_of(2):
        ranks = Lockstep([LayerNorms(rank, 2) for rank in range(2)], min_tokens=1)
        x = rows(13)
        outcome = ranks(x)
        same_numbers(outcome, [LayerNorms(0, 1)(x)])
        assert outcome.changed.collectives == outcome.plain.collectives
        assert outcome.explained.count("no RMSNorm on a token shard") == 4
        assert "sequence parallelism is off for a graph" in caplog.text


@pytest.mark.parametrize("how", ["tensor int8", "tensor fp8"])
def test_padding_reaches_no_largest_number_of_a_tensor(how):
    """One scale for all tokens is computed from all tokens without padding, which would hold the norm's bias."""
    with group_of(3):
        x = rows(13)
        outcome = Lockstep([Biased(rank, 3, how) for rank in range(3)], min_tokens=1)(x)
        same_numbers(outcome, [Biased(0, 1, how)(x)], how)
        assert ("all_gather", "int8") not in outcome.changed.sent_bytes


def test_several_ways_to_quantise_in_one_graph():
    how = [None, "static int8", "dynamic int8", "static fp8", "dynamic fp8", None]
    with group_of(3):
        x = rows(13)
        outcome = Lockstep([Chain(rank, 3, 6, how) for rank in range(3)], min_tokens=1)(x)
        same_numbers(outcome, [Chain(0, 1, 6, how)(x)], "fp8")
        assert found(outcome) == {
            "FirstAllReduceRMSNorm": 1,
            **{"MiddleAllReduceRMSNorm" + SUFFIX[each]: 1 for each in how[1:]},
            "LastAllReduceRMSNorm": 1,
        }


def test_fp8_travels_as_bytes():
    with group_of(2):
        outcome = Lockstep([Chain(rank, 2, how="static fp8") for rank in range(2)], min_tokens=1)(rows(13))
        assert {dtype for _, dtype in outcome.changed.sent_bytes} == {"float32", "uint8"}


@pytest.mark.parametrize("quantize", few(["int8", "fp8"]))
@pytest.mark.parametrize("dynamic", few([True, False]))
def test_what_is_gathered_can_be_quantised_by_the_pass(dynamic, quantize):
    with group_of(3):
        alone = Chain(0, 1)
        ranks = Lockstep([Chain(rank, 3) for rank in range(3)], dynamic, min_tokens=1, quantize=quantize)
        for tokens in (1, 4, 13):
            x = rows(tokens)
            outcome = ranks(x)
            same_numbers(outcome, [alone(x)], quantize)
            check_counts(outcome, 3, tokens, 4, f"dynamic {quantize}", 3)
            assert found(outcome) == {
                "FirstAllReduceRMSNormDynamic" + quantize.upper(): 1,
                "MiddleAllReduceRMSNormDynamic" + quantize.upper(): 2,
                "LastAllReduceRMSNorm": 1,
            }


@pytest.mark.parametrize("dynamic", few([True, False]))
def test_any_eps(dynamic):
    """A graph for any number of tokens has a Python float as an input, which may differ in the next layer."""
    eps = (1e-6, 0.5)
    with group_of(2):
        x = rows(13)
        outcome = Lockstep([Chain(rank, 2, eps=eps) for rank in range(2)], dynamic, min_tokens=1)(x)
        same_numbers(outcome, [Chain(0, 1, eps=eps)(x)])
        assert (Chain(0, 1, eps=eps)(x) - Chain(0, 1)(x)).abs().max() > 0.01
        assert found(outcome)["MiddleAllReduceRMSNorm"] == 2


def test_sums_in_the_order_of_ranks():
    with group_of(3):
        x = rows(13)
        outcome = Lockstep([Chain(rank, 3) for rank in range(3)], min_tokens=1, in_rank_order=True)(x)
        same_numbers(outcome, [Chain(0, 1)(x)])
        assert outcome.changed.collectives == {"all_to_all": 4, "all_gather": 4}
        assert outcome.changed.sent_bytes["all_to_all", "float32"] == 4 * 15 * H * 4 * 2 // 3
        first = outcome.changed.returned[0][0]
        assert all(torch.equal(first, each[0]) for each in outcome.changed.returned)


def test_nothing_between_collectives_and_products():
    """Torch's micro_pipeline_tp can then find both, if no tokens have to be padded."""
    with group_of(2):
        graph = Lockstep([Chain(rank, 2) for rank in range(2)], min_tokens=1)(rows(14)).graph
    functional = torch.ops._c10d_functional
    scattered = [node for node in graph.nodes if node.target is functional.reduce_scatter_tensor.default]
    gathered = [node for node in graph.nodes if node.target is functional.all_gather_into_tensor.default]
    assert all(node.args[0].target is torch.ops.aten.mm.default for node in scattered)
    products = [user.target for node in gathered for wait in node.users for user in wait.users if user.op != "output"]
    assert products == [torch.ops.aten.mm.default] * 3
