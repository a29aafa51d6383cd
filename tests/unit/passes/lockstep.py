"""Run all ranks of a group in one process: graphs run node by node, and collectives combine all ranks' operands."""

import contextlib
import copy
import operator
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.distributed.fake_pg import FakeStore

from longhelix.passes import SequenceParallel, pieces
from longhelix.passes.collectives import PassGroup

functional = torch.ops._c10d_functional
NAMES = {
    functional.all_reduce.default: "all_reduce",
    functional.reduce_scatter_tensor.default: "reduce_scatter",
    functional.all_gather_into_tensor.default: "all_gather",
    functional.all_to_all_single.default: "all_to_all",
    pieces.ALL_GATHER: "all_gather",
    pieces.ALL_TO_ALL: "all_to_all",
}


@contextlib.contextmanager
def group_of(size):
    """Fake process group of the given size, whose ranks do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def pass_of(rank, size, in_pieces=False, **options):
    """Return the pass of one rank of the group. in_pieces: send in pieces, as over gloo."""
    sp = SequenceParallel(**options)
    sp.in_pieces = in_pieces
    sp.group = PassGroup(sp.group.name, size, rank)
    return sp


@dataclass
class Ran:
    """What ranks' graphs returned, the number of collectives by name, and the bytes that rank 0 sent by name and
    dtype, on a ring or directly."""

    returned: list[list[torch.Tensor]] = field(default_factory=list)
    collectives: Counter = field(default_factory=Counter)
    sent_bytes: Counter = field(default_factory=Counter)


@dataclass
class Outcome:
    """Runs without the pass (plain) and with it (changed), and the report of rank 0's pass for its graph."""

    plain: Ran
    changed: Ran
    report: dict
    explained: str
    graph: torch.fx.Graph


class Lockstep:
    """One module per rank, traced by torch.compile without the pass and with it. `alike`: the modules differ only in
    their parameters and buffers, so that all ranks use the graph of the first."""

    def __init__(self, modules, dynamic=None, alike=True, **options):
        self.size, self.alike = len(modules), alike
        self.modules, self.options = modules, options
        self.dynamic = dynamic
        self._called = None
        self._compiled = [self._compile(module) for module in modules[: 1 if alike else None]]
        self._changed = {}

    def _compile(self, module):
        def compiler(graph, examples):
            def run(*arguments):
                self._called = graph, arguments
                return graph(*arguments)

            return make_boxed_func(run)

        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
        return torch.compile(module, backend=backend, fullgraph=True, dynamic=self.dynamic)

    def __call__(self, *inputs):
        traced = [self._trace(compiled, inputs) for compiled in self._compiled]
        if self.alike:
            graph, arguments = traced[0]
            traced = [(graph, self._of_rank(rank, arguments)) for rank in range(self.size)]
        graphs, arguments = zip(*traced, strict=True)
        changed, report, explained = self._change(graphs)
        return Outcome(run(graphs, arguments), run(changed, arguments), report, explained, changed[0].graph)

    def _trace(self, compiled, inputs):
        with torch.no_grad():
            compiled(*inputs)
        return self._called

    def _of_rank(self, rank, arguments):
        own = dict(self.modules[rank].state_dict(keep_vars=True))
        names = {each.data_ptr(): name for name, each in self.modules[0].state_dict(keep_vars=True).items()}
        return [
            own[names[each.data_ptr()]] if isinstance(each, torch.Tensor) and each.data_ptr() in names else each
            for each in arguments
        ]

    def _change(self, graphs):
        key = tuple(map(id, graphs))
        if key not in self._changed:
            changed, found, summaries = [], None, set()
            for rank, graph in enumerate(graphs):
                counters.clear()
                sp = pass_of(rank, self.size, **self.options)
                changed.append(copy.deepcopy(graph))
                sp(changed[-1].graph)
                changed[-1].recompile()
                found = found or (sp.report(), sp.explain())
                summaries |= {key for key in counters["inductor"] if "/graph/" in key}
            said = {key.partition("/graph/")[2] for key in summaries}
            assert len(said) == 1, f"ranks' graphs differ: {said}"
            self._changed[key] = changed, *found, graphs
        return self._changed[key][:3]


def run(graphs, arguments):
    """Run the ranks' graphs, each with its own arguments, from one collective to the next."""
    ran, size = Ran(), len(graphs)
    ranks = [_run(graph, own) for graph, own in zip(graphs, arguments, strict=True)]
    results = [None] * size
    with torch.no_grad():
        while not ran.returned:
            at = [rank.send(result) for rank, result in zip(ranks, results, strict=True)]
            assert len({target for target, _ in at}) == 1, f"ranks are in different collectives: {at}"
            target, given = at[0][0], [args for _, args in at]
            if target == "output":
                ran.returned = [args[0] for args in given]
            else:
                results = collective(target, given, size, ran)
    return ran


def _run(graph, arguments):
    """Run one rank's graph: yield its collectives, receive their results, and finally yield what it returns."""
    known, given = {}, iter(arguments)
    for node in graph.graph.nodes:
        args, named = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        if node.op == "placeholder":
            known[node] = copy.copy(next(given))
        elif node.op == "get_attr":
            known[node] = operator.attrgetter(node.target)(graph)
        elif node.op == "output":
            yield "output", args
        elif node.target in NAMES or node.target is functional.wait_tensor.default:
            known[node] = yield node.target, args
        else:
            known[node] = node.target(*args, **named)


def collective(target, arguments, size, ran):
    given = [args[0] for args in arguments]
    if target is functional.wait_tensor.default:
        return given
    assert len({each.shape for each in given}) == 1
    name, bytes_ = NAMES[target], given[0].numel() * given[0].element_size()
    assert all(arguments[0][1:] == args[1:] for args in arguments)
    ran.collectives[name] += 1
    key = name, str(given[0].dtype).removeprefix("torch.")
    if name == "all_reduce":
        assert arguments[0][1] == "sum"
        ran.sent_bytes[key] += 2 * bytes_ * (size - 1) // size
        return [sum(given[1:], given[0]) for _ in given]
    if name == "all_gather":
        assert arguments[0][1] == size
        ran.sent_bytes[key] += bytes_ * (size - 1)
        return [torch.cat(given) for _ in given]
    ran.sent_bytes[key] += bytes_ * (size - 1) // size
    if name == "reduce_scatter":
        assert arguments[0][1:3] == ("sum", size)
        return list(sum(given[1:], given[0]).split(len(given[0]) // size))
    sizes = arguments[0][1]
    if target is pieces.ALL_TO_ALL:
        sizes = [len(given[0]) // size] * size
    else:
        assert sizes == arguments[0][2]
    assert len(sizes) == size
    parts = [each.split(sizes) for each in given]
    return [torch.cat([part[rank] for part in parts]) for rank in range(size)]
