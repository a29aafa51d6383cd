"""Large messages over gloo are sent in pieces, with the same numbers, bytes and collectives."""

import pytest
import torch
from lockstep import Lockstep, group_of, pass_of
from modules import Chain, Experts, H, rows, summed
from test_sequence_parallel import same_numbers
from torch._inductor import config as inductor
from torch._inductor import ir, memory

from longhelix.passes.pieces import _pieces
from tiers import few

LAYERS = 3


@pytest.mark.parametrize(("size", "dynamic", "quantize"), few([(3, True, "int8"), (2, False, "fp8"), (3, False, None)]))
def test_the_same_collectives(size, dynamic, quantize):
    with group_of(size):
        alone = Chain(0, 1, LAYERS)
        modules = [Chain(rank, size, LAYERS) for rank in range(size)]
        options = {"min_tokens": 1, "quantize": quantize, "in_rank_order": True}
        in_pieces, whole = (Lockstep(modules, dynamic, in_pieces=given, **options) for given in (True, False))
        for tokens in (1, 3, 13, 100):
            x = rows(tokens)
            outcome, one = in_pieces(x), whole(x)
            same_numbers(outcome, [alone(x)], quantize)
            (mine,), (other,) = outcome.changed.returned[0], one.changed.returned[0]
            assert (mine == other).all()
            assert outcome.changed.sent_bytes == one.changed.sent_bytes
            assert outcome.changed.collectives == one.changed.collectives
            assert outcome.report == one.report
            targets = {node.target for node in outcome.graph.nodes if "all_" in str(node.target)}
            assert {str(target) for target in targets} == {
                f"longhelix_passes.{name}.default" for name in ("all_gather", "all_to_all")
            }


def test_experts():
    with group_of(2):
        alone = Experts(0, 1)
        modules = [Experts(rank, 2) for rank in range(2)]
        options = {"min_tokens": 1, "in_rank_order": True, "in_pieces": True, "own_chunks": True}
        x = rows(13)
        same_numbers(Lockstep(modules, alike=False, **options)(x), [alone(x)])


def test_pieces_have_all_rows():
    """A small message stays whole; others have at most one piece per row, and at most sixteen."""
    for tokens, size, count in (
        (0, 8, 1),
        (1, 1 << 20, 1),
        (3, 1 << 20, 3),
        (1000, 1024, 3),
        (5001, 8192, 16),
        (7, 9, 1),
    ):
        x_LX = rows(1).new_empty(tokens, size // 4, device="meta")
        found = _pieces(x_LX)
        assert len(found) == count
        assert [row for piece in found for row in range(tokens)[piece]] == list(range(tokens))


class EnoughError(Exception):
    """Raised once the compiler has ordered a graph's ops, to stop it there."""


class Ahead(torch.nn.Module):
    """Layers beside a product of `columns`, a rank's own, that is there from the beginning and needed at the end: the
    compiler orders ops by the memory that they take, and all that a layer adds to is returned as well."""

    def __init__(self, columns):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(shape)) for shape in ((H, columns), (columns, H)))
        self.chain = Chain(0, 2, 3)

    def forward(self, x):
        ahead, returned = x @ self.up, []
        residual = summed(self.chain.embed(x), 2)
        for norm, mixer in zip(self.chain.norms, self.chain.mixers, strict=True):
            residual = residual + summed(mixer(norm(residual)), 2)
            returned.append(residual)
        return self.chain.last(residual + summed(ahead @ self.down, 2)), *returned


@pytest.mark.parametrize("quantize", ["int8", None])
def test_all_ranks_run_them_in_one_order(monkeypatch, quantize):
    """The order does not depend on the memory that a rank's own shards take."""
    orders = []

    def scheduled(nodes, *arguments, **named):
        ops = [part.node for node in reorder(nodes, *arguments, **named) for part in node.get_nodes()]
        collectives = [op for op in ops if isinstance(op, ir.FallbackKernel) and "all_" in str(op.op_overload)]
        orders.append([(str(op.op_overload), str(op.inputs[0].get_dtype())) for op in collectives])
        raise EnoughError

    reorder = memory.reorder_for_peak_memory
    monkeypatch.setattr(memory, "reorder_for_peak_memory", scheduled)
    for columns in (2000, 1):
        with group_of(2), torch.no_grad(), inductor.patch(force_disable_caches=True):
            sp = pass_of(0, 2, in_pieces=True, min_tokens=1, quantize=quantize, in_rank_order=True)
            module = torch.compile(
                Ahead(columns), fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": sp}
            )
            with pytest.raises(Exception, match="EnoughError"):
                module(rows(64))
    assert orders[0] == orders[1]
    assert len(orders[0]) >= 5 + 5
    assert all("longhelix_passes" in name for name, _ in orders[0])
