"""What the pass leaves unchanged with a message: small graphs, unsuitable graphs, and invalid options."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from lockstep import Lockstep, group_of, pass_of
from modules import Chain, H, Mixer, Norm, rows, summed, weight
from test_sequence_parallel import found, near, same_numbers
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode

from longhelix.passes import SequenceParallel
from tiers import few

pytestmark = pytest.mark.unit


def traced(tokens=13, dynamic=None, size=2, module=Chain):
    """Return the graph of a rank as the pass receives it."""
    ranks = Lockstep([module(rank, size) for rank in range(size)], dynamic, min_tokens=1)
    graph, _ = ranks._trace(ranks._compiled[0], (rows(tokens),))
    return copy.deepcopy(graph).graph


@pytest.mark.parametrize("min_tokens", few([13, 7, 14]))
def test_the_pass_does_what_its_predicate_says(min_tokens):
    with group_of(2):
        ranks = Lockstep([Chain(rank, 2) for rank in range(2)], False, min_tokens=min_tokens)
        for tokens in (6, 7, 12, 13, 14, 15):
            outcome = ranks(rows(tokens))
            same_numbers(outcome, [Chain(0, 1)(rows(tokens))])
            applies = pass_of(0, 2, min_tokens=min_tokens).applies(tokens)
            assert applies == (tokens >= min_tokens)
            assert bool(found(outcome)) == applies
            assert ("too few tokens" in outcome.explained) == (not applies)


def test_graphs_for_any_number_of_tokens_need_to_be_known_to_be_large():
    with group_of(2):
        graph = traced(200, dynamic=True)
        left, taken = pass_of(0, 2, min_tokens=100), pass_of(0, 2, min_tokens=100, tokens=(100, None))
        left(graph)
        assert "not known to be enough" in left.explain()
        assert left.report()["collectives"]["after"] == {"all_reduce": 4}
        taken(graph)
        assert taken.report()["patterns"]["MiddleAllReduceRMSNorm"] == 2
        few = pass_of(0, 2, min_tokens=100, tokens=(1, 99))
        few(traced(50, dynamic=True))
        assert not few.report()["patterns"]["MiddleAllReduceRMSNorm"]


def test_a_bound_that_the_caller_marks_is_known():
    with group_of(2):
        x = rows(200)
        torch._dynamo.mark_dynamic(x, 0, min=100, max=100_000)
        ranks = Lockstep([Chain(rank, 2) for rank in range(2)], min_tokens=100)
        assert found(ranks(x))["MiddleAllReduceRMSNorm"] == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_pass_binds_a_graph_to_no_number_of_tokens(dynamic):
    with group_of(2):
        graph = traced(2, dynamic)  # one for each rank
        env = detect_fake_mode([node.meta.get("val") for node in graph.nodes]).shape_env
        before = list(env.guards)
        pass_of(0, 2, min_tokens=1)(graph)
        assert env.guards == before


def test_a_second_application_changes_nothing():
    with group_of(3):
        graph = traced(size=3)
        sp = pass_of(0, 3, min_tokens=1)
        sp(graph)
        before, patterns = str(graph), sp.report()["patterns"]
        sp(graph)
        assert str(graph) == before
        assert sp.report()["patterns"] == patterns


@torch.library.custom_op("longhelix_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x))


@twice.register_fake
def _(x):
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


class Twice(Chain):
    """An op that is declared token-wise and is not."""

    def forward(self, x):
        return twice(super().forward(x))


def test_a_rule_that_is_wrong_leaves_the_graph_as_it_is(caplog):
    with group_of(2):
        graph = traced(module=Twice)
        before = str(graph)
        sp = pass_of(0, 2, min_tokens=1, token_wise={torch.ops.longhelix_tests.twice.default: ["x"]})
        sp(graph)
        assert str(graph) == before
        assert "the graph stays unchanged" in caplog.text
        assert "another shape" in sp.explain()
        assert not any(sp.report()["patterns"].values())
        outcome = Lockstep([Twice(rank, 2) for rank in range(2)], min_tokens=1)(rows(13))
        same_numbers(outcome, [Twice(0, 1)(rows(13))])


class Own(Chain):
    """Each rank adds its own value to a sum."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.own = nn.Parameter(weight(H, H, 70 + rank))

    def forward(self, x):
        return self.last(summed(self.embed(x), self.size) + x @ self.own.T)


def test_values_that_differ_between_ranks_are_not_sharded():
    with group_of(3):
        outcome = Lockstep([Own(rank, 3) for rank in range(3)], min_tokens=1)(rows(13))
        for changed, plain in zip(outcome.changed.returned, outcome.plain.returned, strict=True):
            near(changed[0], plain[0])
        first, second, _ = (each[0] for each in outcome.plain.returned)
        assert (first - second).abs().max() > 0.1
        assert not found(outcome)
        assert "which may differ between ranks" in outcome.explained


class Summand(nn.Module):
    """Each rank adds a share of the residual to its part of the next sum."""

    def __init__(self, rank, size):
        super().__init__()
        self.size = size
        self.embed, self.mixer = Mixer(rank, size, 1), Mixer(rank, size, 20)
        self.norm, self.last = Norm(10), Norm(30)

    def forward(self, x):
        residual = summed(self.embed(x), self.size)
        mixed = self.mixer(self.norm(residual))
        return self.last(summed(mixed + residual / self.size + x / self.size, self.size))


def test_a_residual_within_a_sum():
    with group_of(3):
        for tokens in (1, 4, 13):
            outcome = Lockstep([Summand(rank, 3) for rank in range(3)], min_tokens=1)(rows(tokens))
            same_numbers(outcome, [Summand(0, 1)(rows(tokens))])


class InTwoDims(Chain):
    """Tokens in two dims: batch and sequence."""

    def forward(self, x):
        return super().forward(x.view(-1, x.shape[0] // 3 or 1, H)).view(-1, H)


@pytest.mark.parametrize("size", few([2, 4]))
def test_a_batch_of_sequences(size):
    with group_of(size):
        ranks = Lockstep([InTwoDims(rank, size) for rank in range(size)], False, min_tokens=1)
        for tokens in (3, 9, 15):
            outcome = ranks(rows(tokens))
            same_numbers(outcome, [InTwoDims(0, 1)(rows(tokens))])
            assert found(outcome)["MiddleAllReduceRMSNorm"] == 2


@torch.library.custom_op("longhelix_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@picky.register_fake
def _(x):
    if x.shape[0] != 13:
        raise ValueError("this op takes 13 rows alone")
    return torch.empty_like(x)


class Picky(Chain):
    def forward(self, x):
        return picky(self.last(summed(self.embed(x), self.size)))


def test_an_op_that_takes_no_shard_leaves_the_graph_as_it_is():
    with group_of(2):
        graph = traced(module=Picky)
        before = str(graph)
        sp = pass_of(0, 2, min_tokens=1, token_wise={torch.ops.longhelix_tests.picky.default: ["x"]})
        sp(graph)
        assert str(graph) == before
        assert "this op takes 13 rows alone" in sp.explain()


class Shift(Chain):
    """Each token uses the one before it, because padding shifts the rows."""

    def forward(self, x):
        total = summed(self.embed(x), self.size)
        return self.last(total + nn.functional.pad(total, (0, 0, 1, -1)))


class FirstHalf(Chain):
    """A slice of rows that happens to be the token shard of one of two ranks."""

    def forward(self, x):
        half = self.last(summed(self.embed(x), self.size))[: (x.shape[0] + 1) // 2]
        return summed(self.mixers[0](half), self.size)


class Channels(Chain):
    """Each rank takes its own channels of a common value, for a product over them."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.rank = rank
        self.product = nn.Parameter(weight(H, H, 80).chunk(size, 1)[rank].clone())

    def forward(self, x):
        normed = self.last(summed(self.embed(x), self.size))
        own = torch.tanh(normed.split(H // self.size, -1)[self.rank].contiguous())
        return summed(own @ self.product.T, self.size)


class OwnScale(Chain):
    """A value is scaled by each rank's own numbers, and then summed again."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.own = nn.Parameter(weight(1, H, 90 + rank)[0])

    def forward(self, x):
        return self.last(summed(self.last(summed(self.embed(x), self.size)) * self.own, self.size))


class TwoDims(Chain):
    """One input is added to values with tokens in one dim, and in two."""

    def forward(self, x):
        total = summed(self.embed(x), self.size)
        flat = self.last(total + x)
        return flat + self.last(total.view(2, -1, H) + x.view(2, -1, H)).view(-1, H)


class Compared(Chain):
    """A bfloat16 value is compared with one float32 number. The dims of the number decide the dtype."""

    def forward(self, x):
        total = self.last(summed(self.embed(x), self.size))
        row = total.sum(-1).bfloat16()
        return total * (row > torch.full((1,), 0.1001)).unsqueeze(-1)


class Prepended(Chain):
    """Padding before the rows instead of after them."""

    def forward(self, x):
        normed = self.last(summed(self.embed(x), self.size))
        rows_of = (x.shape[0] + self.size - 1) // self.size
        padded = nn.functional.pad(normed, (0, 0, rows_of * self.size - x.shape[0], 0))
        return summed(self.mixers[0](padded[:rows_of]), self.size)


@pytest.mark.parametrize(
    ("module", "alike", "tokens"),
    [
        (Shift, True, (13, 28)),
        (FirstHalf, True, (13, 28)),
        (Channels, False, (13, 28)),
        (OwnScale, True, (13, 28)),
        (TwoDims, True, (14, 28)),
        (Compared, True, (13, 28)),
        (Prepended, True, (13, 27)),
    ],
)
@pytest.mark.parametrize(
    "options", few([{"quantize": "int8"}, {}, {"min_tokens": 100}, {"own_chunks": True}], 2), ids=str
)
def test_what_only_looks_token_wise(module, alike, tokens, options):
    if "own_chunks" in options and module is FirstHalf:
        pytest.skip("it is said to take its own rows, and does not")
    with group_of(2):
        ranks = Lockstep([module(rank, 2) for rank in range(2)], False, alike, **({"min_tokens": 1} | options))
        for count in tokens:
            outcome = ranks(rows(count))
            for changed, plain in zip(outcome.changed.returned, outcome.plain.returned, strict=True):
                near(changed[0], plain[0], options.get("quantize"))
            assert outcome.report["collectives"]["after"] == dict(outcome.changed.collectives)


class Copied(nn.Module):
    """An output is a copy of an input. Without the copy, changes of one would show in the other."""

    def __init__(self):
        super().__init__()
        self.mixer = Mixer(0, 2, 1)

    def forward(self, x):
        return x.to(torch.float32, copy=True), nn.functional.pad(x, (0, 0, 0, 0)), summed(self.mixer(x), 2)


def test_copies_of_inputs_stay():
    with group_of(2):
        outcome = Lockstep([Copied(), Copied()], False, min_tokens=1)(x := rows(14))
        copied, padded, _ = outcome.changed.returned[0]
        assert x.data_ptr() not in (copied.data_ptr(), padded.data_ptr())


def compile_and_change(module, x, sp, **options):
    def compiler(graph, examples):
        sp(graph.graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return torch.compile(module, backend=backend, **options)(x)


def test_graphs_with_a_backward_stay(caplog):
    counters.clear()
    with group_of(2):
        sp = pass_of(0, 2, min_tokens=1)
        compile_and_change(Chain(0, 2), rows(13), sp, fullgraph=True)
        assert "compile under torch.no_grad()" in sp.explain()
        assert "sequence parallelism is off" in caplog.text
        report = sp.report()["collectives"]
        assert report["after"] == report["before"] == {"all_reduce": 4}


class Broken(Chain):
    def forward(self, x):
        x = summed(self.embed(x), self.size)
        torch._dynamo.graph_break()
        return self.last(x + summed(self.mixers[0](self.norms[0](x)), self.size))


class Branching(Chain):
    def forward(self, x):
        def more(x):
            return self.last(x + summed(self.mixers[0](self.norms[0](x)), self.size))

        return torch.cond(x.sum() > 0, more, lambda x: self.last(x), (summed(self.embed(x), self.size),))


def test_branches_stay():
    counters.clear()
    with group_of(2), torch.no_grad():
        sp = pass_of(0, 2, min_tokens=1)
        compile_and_change(Branching(0, 2), rows(13), sp, fullgraph=True)
        assert "it has collectives in branches" in sp.explain()
        report = sp.report()["collectives"]
        assert report["after"] == report["before"] == {"all_reduce": 1}


def test_pieces_of_a_model_stay():
    counters.clear()
    with group_of(2), torch.no_grad():
        sp = pass_of(0, 2, min_tokens=1)
        compile_and_change(Broken(0, 2), rows(13), sp)
        assert sp.explain().count("it is a piece of a model") == 1  # one message for both pieces
        report = sp.report()["collectives"]
        assert report["after"] == report["before"] == {"all_reduce": 2}


def test_a_group_of_one_is_off(caplog):
    with group_of(1):
        sp = SequenceParallel(min_tokens=1)
        assert "the group has one rank" in caplog.text
        assert not sp.applies(1000)
        compile_and_change(Chain(0, 1), rows(13), sp)
        assert not any(sp.report()["patterns"].values())


def test_default_threshold():
    with group_of(2):
        sp = SequenceParallel()
        assert (sp.applies(999), sp.applies(1000)) == (False, True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_tokens": 0}, "min_tokens must be an integer of 1 or more, not 0"),
        ({"min_tokens": -5}, "1 or more, not -5"),
        ({"min_tokens": 2.0}, "not 2.0"),
        ({"min_tokens": True}, "not True"),
        ({"quantize": "int4"}, "'int4' is not known: use one of int8, fp8"),
        ({"group": "tp"}, "ProcessGroup, not str"),
        ({"tokens": (5, 4)}, "the smallest and the largest number of tokens"),
        ({"tokens": (0, None)}, "the smallest and the largest number of tokens"),
        ({"tokens": 7}, "the smallest and the largest number of tokens"),
        ({"scales": {"x": 1.0}}, "set quantize as well"),
        (
            {"quantize": "int8", "scales": {"int8/x": 0.0}},
            "int8/x is 0.0: it must be a finite float above 0",
        ),
        ({"quantize": "int8", "scales": {"int8/x": 1}}, "the scale of int8/x is 1: it must be a finite float"),
        ({"quantize": "int8", "scales": {"fp8/x": 1.0}}, "'fp8/x', which is not for int8: pass calibration.scales"),
        ({"quantize": "int8", "scales": {0: 1.0}}, "has the key 0, which is not for int8"),
        ({"quantize": ["int8"]}, r"quantize \['int8'\] is not known"),
        (
            {"quantize": "int8", "scales": 2.0},
            r"a Calibration, or the dict that its scales\(\) returns, not float",
        ),
        ({"in_rank_order": "no"}, "True, False or None, not 'no'"),
        ({"own_chunks": 3}, "True or False, not 3"),
        ({"token_wise": [1]}, "must map ops to names of their operands"),
        ({"token_wise": {"x": ["x"]}}, "must map ops to names of their operands"),
        ({"token_wise": {torch.ops.aten.relu.default: "self"}}, "must map ops to names of their operands"),
        ({"token_wise": {torch.ops.aten.relu.default: ["x"]}}, "must map ops to names of their operands"),
        ({"norms": 5}, "norms must be a list of ops"),
        ({"norms": "abc"}, "norms must be a list of ops"),
    ],
)
def test_invalid_options(options, sentence):
    with group_of(2), pytest.raises(ValueError, match=sentence):
        SequenceParallel(**options)


def test_no_ranks():
    with pytest.raises(ValueError, match=r"init_process_group"):
        SequenceParallel()


def test_what_decides_is_in_the_uuid():
    with group_of(4):
        passes = [
            pass_of(0, 4, min_tokens=5),
            pass_of(1, 4, min_tokens=5),
            pass_of(0, 3, min_tokens=5),
            pass_of(0, 4, min_tokens=6),
            pass_of(0, 4, min_tokens=5, quantize="int8"),
            pass_of(0, 4, min_tokens=5, tokens=(5, None)),
            pass_of(0, 4, min_tokens=5, in_rank_order=True),
            pass_of(0, 4, min_tokens=5, own_chunks=True),
            pass_of(0, 4, min_tokens=5, token_wise={torch.ops.longhelix_tests.twice.default: ["x"]}),
            pass_of(0, 4, min_tokens=5, norms=[torch.ops.longhelix_tests.twice.default]),
        ]
        assert len({each.uuid() for each in passes}) == len(passes)
        assert passes[0].uuid() == pass_of(0, 4, min_tokens=5).uuid()
