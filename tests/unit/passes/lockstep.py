"""All ranks of a group in one process: their graphs run node by node, and what a collective gives is made of all."""

import contextlib
import operator
import tempfile
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.distributed.fake_pg import FakeStore

from longhelix.passes import SequenceParallel
from longhelix.passes.collectives import RankGroup

functional = torch.ops._c10d_functional


@contextlib.contextmanager
def group_of(size):
    """A group of so many ranks in this process, none of which does anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def pass_of(rank, size, **options):
    """The pass as this rank of the group has it."""
    sp = SequenceParallel(**options)
    sp.group = RankGroup(sp.group.name, size, rank)
    return sp


@dataclass
class Traced:
    """The graph of one rank, and what it was called with."""

    graph: torch.fx.GraphModule
    arguments: tuple


def trace(module, inputs, change=None, dynamic=None):
    """The graphs that torch.compile has for calls of the module, each as the pass `change` leaves it."""
    found = []

    def compiler(graph, examples):
        if change is not None:
            change(graph.graph)
            graph.recompile()

        def run(*arguments):
            found.append(Traced(graph, arguments))
            return graph(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        compiled(*inputs)
    return found[-1]


def run_in_lockstep(traced):
    """What each rank's graph returns."""
    size = len(traced)
    values = [{} for _ in traced]
    arguments = [iter(each.arguments) for each in traced]
    for nodes in zip(*(each.graph.graph.nodes for each in traced), strict=True):
        kinds = {(node.op, node.target if node.op == "call_function" else None) for node in nodes}
        assert len(kinds) == 1, f"ranks run different nodes: {nodes}"
        first = nodes[0]
        if first.op == "placeholder":
            for known, node, given in zip(values, nodes, arguments, strict=True):
                known[node] = next(given)
            continue
        if first.op == "get_attr":
            for known, node, each in zip(values, nodes, traced, strict=True):
                known[node] = operator.attrgetter(node.target)(each.graph)
            continue
        loaded = [
            torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            for known, node in zip(values, nodes, strict=True)
        ]
        if first.op == "output":
            return [args[0] for args, _ in loaded]
        if getattr(first.target, "namespace", None) == "_c10d_functional":
            results = collective(first.target, [args for args, _ in loaded], size)
        else:
            results = [first.target(*args, **named) for args, named in loaded]
        for known, node, result in zip(values, nodes, results, strict=True):
            known[node] = result
    raise AssertionError("a graph without an output")


def collective(target, arguments, size):
    given = [args[0] for args in arguments]
    if target is functional.wait_tensor.default:
        return given
    if target is functional.all_reduce.default:
        assert {args[1] for args in arguments} == {"sum"}
        return [sum(given[1:], given[0]) for _ in given]
    if target is functional.reduce_scatter_tensor.default:
        assert {args[1:3] for args in arguments} == {("sum", size)}
        return list(sum(given[1:], given[0]).chunk(size)) if len(given[0]) else given
    if target is functional.all_gather_into_tensor.default:
        assert len({each.shape for each in given}) == 1
        return [torch.cat(given) for _ in given]
    assert target is functional.all_to_all_single.default, target
    received, sent = arguments[0][1], [args[2] for args in arguments]
    assert all(sizes == received for sizes in sent)
    parts = [each.split(sizes) for each, sizes in zip(given, sent, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(size)]


def both_ways(modules, inputs, dynamic=None, **options):
    """What the ranks' modules return without the pass and with it, by rank, and the pass's report for rank 0."""
    size = len(modules)
    torch._dynamo.reset()
    counters.clear()
    plain = run_in_lockstep([trace(module, inputs, dynamic=dynamic) for module in modules])
    torch._dynamo.reset()
    traced, report = [], None
    for rank, module in enumerate(modules):
        sp = pass_of(rank, size, **options)
        torch._dynamo.reset()
        traced.append(trace(module, inputs, sp, dynamic))
        report = sp.report() if rank == 0 else report
    return plain, run_in_lockstep(traced), report, traced
