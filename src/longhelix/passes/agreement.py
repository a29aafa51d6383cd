"""Check that all ranks of a group changed their graphs in the same way.

Ranks compare summaries of their graphs before a graph runs for the first time. Without this check, a rank could wait
forever in a collective that another rank does not run.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch._guards import CompileContext
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx import Graph, Node

from longhelix.passes.collectives import Collective, PassGroup
from longhelix.passes.plan import ShardingPlan
from longhelix.passes.region import Gathered
from longhelix.passes.rules import OwnRows, ShardOperand, ShardRows, Squeezed

# A float of a module can be a constant in the graph of one rank and an operand in the graph of another rank, because
# torch may decide this by the iteration order of a set. Summaries therefore describe both in the same way.
_FLOAT = "a number"

KIND = "graph"  # kind of the counts that record graphs; each count has the summary of a graph as its name


class RanksDifferError(TorchRuntimeError):
    """The ranks of a group would run different collectives, or compute their token shards differently."""


def summary(options: str, graph_lines: list[str], after: list[Collective]) -> str:
    """Return the text that must be equal on all ranks for one graph: readable counts and a digest.

    Args:
        options: Options of the pass, in words.
        graph_lines: The graph's nodes on token shards, from `shard_lines`.
        after: Collectives of the changed graph.
    """
    text = "\n".join((options, *graph_lines, *(f"{each.name} {each.dtype}" for each in after)))
    counts = Counter(each.name for each in after)
    counted = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no collectives"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{counted}, {len(graph_lines)} ops on token shards ({options}; {digest})"


def shard_lines(graph: Graph, plan: ShardingPlan) -> Iterator[str]:
    """Yield one line per node on token shards. Ranks that compute their shards the same way yield the same lines."""
    numbers = {node: number for number, node in enumerate(node for node in graph.nodes if node in _on_shards(plan))}
    for node, number in numbers.items():
        source = plan.region.sources.get(node)
        after = " gathered" * (node in plan.gathered) + " quantised" * (node in plan.quantised)
        if source is not None:
            yield f"{number}: {'all-gather' if isinstance(source, Gathered) else 'all-reduce'}{after}"
        elif node in plan.sharded:
            call = plan.region.calls[node]
            named = {name: _describe(each, numbers) for name, each in sorted(call.named.items())}
            yield f"{number}: {node.target} {_describe(call.arguments, numbers)} {named}{after}"
        else:
            yield f"{number}: rows of {numbers.get(dict(plan.chunks)[node])}"


def _on_shards(plan: ShardingPlan) -> set[Node]:
    return {*plan.sharded, *(source.node for source in plan.sources), *(chunk for chunk, _ in plan.chunks)}


def _describe(argument: Any, numbers: dict[Node, int]) -> str:
    """Describe an argument of an op on shards. Sizes of other values are left out, as they differ by rank."""
    if isinstance(argument, ShardOperand):
        return f"%{numbers.get(argument.node)}"
    if isinstance(argument, OwnRows):
        return "rows of " + _describe(argument.node, numbers)
    if isinstance(argument, Squeezed):
        return _describe(argument.node, numbers)
    if isinstance(argument, ShardRows):
        return "L"
    if isinstance(argument, Node):
        value = argument.meta["val"]
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
            return _FLOAT
        return str(getattr(value, "dtype", type(value).__name__))
    if isinstance(argument, float):
        return _FLOAT
    if isinstance(argument, (list, tuple)):
        return "(" + ", ".join(_describe(each, numbers) for each in argument) + ")"
    return repr(argument)


@dataclass
class _Ranks:
    """State of the comparison between the ranks of a group."""

    group: PassGroup
    store: dist.Store  # where ranks exchange summaries
    agreed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # equal summaries, by prefix
    differ: bool = False


@dataclass(frozen=True)
class _Compiling:
    """A compilation in progress."""

    context: CompileContext
    ranks: _Ranks
    before: Counter[str]  # torch's counters when the compilation started


_ranks: dict[str, _Ranks] = {}  # by the group's name
_compiling: dict[str, "_Compiling"] = {}  # by the prefix of a pass's counts


def expect(prefix: str, group: PassGroup) -> None:
    """Make ranks compare the counts of the current compilation under `prefix` before the compiled function runs."""
    context = CompileContext.try_get()
    # A failed compilation may have left its entry under this prefix, so the contexts are compared too.
    if context is None or (prefix in _compiling and _compiling[prefix].context is context):
        return
    store = _get_default_store()
    if group.name not in _ranks or _ranks[group.name].store is not store:
        _ranks[group.name] = _Ranks(group, store)
    _compiling[prefix] = _Compiling(context, _ranks[group.name], Counter(counters["inductor"]))


def found_difference(group: PassGroup) -> bool:
    """True if an earlier comparison found that the group's ranks differ."""
    return group.name in _ranks and _ranks[group.name].differ


def _compare(_: CodeType, __: CodeType) -> None:
    """Compare summaries when a compiled function is about to run.

    Raises:
        RanksDifferError: The ranks' graphs differ.
    """
    context = CompileContext.try_get()
    compiling = {prefix: each for prefix, each in _compiling.items() if each.context is context}
    _compiling.clear()
    for prefix, each in compiling.items():
        ranks, before = each.ranks, each.before
        start = f"{prefix}{KIND}/"
        fresh = {
            key.removeprefix(start)
            for key, count in counters["inductor"].items()
            if key.startswith(start) and count > before[key]
        }
        if fresh - ranks.agreed[prefix]:
            _agree(ranks, sorted(fresh - ranks.agreed[prefix]))
            ranks.agreed[prefix] |= fresh


# Torch calls this hook after it has compiled a function or loaded it from its cache, before the function runs.
register_bytecode_hook(_compare)


def _agree(ranks: _Ranks, own: list[str]) -> None:
    group = ranks.group
    place = f"longhelix.passes/{group.name}"
    # The store counts the comparisons, because it may outlive this process group.
    where = f"{place}/{ranks.store.add(f'{place}/times/{group.rank}', 1)}"
    ranks.store.set(f"{where}/{group.rank}", "; ".join(own))
    summaries = []
    for rank in range(group.size):
        try:
            summaries.append(ranks.store.get(f"{where}/{rank}").decode())
        except RuntimeError as error:  # each kind of store raises its own subclass
            ranks.store.set(f"{where}/{group.rank}", "gave up")  # a rank that reads this entry later then also fails
            raise _difference(
                ranks,
                f"rank {rank} of {group.size} has not compiled the graph that this rank compiled: {'; '.join(own)}. "
                "Make all ranks run the same code",
            ) from error
    other = next((rank for rank in range(group.size) if summaries[rank] != summaries[0]), None)
    if other is not None:
        raise _difference(
            ranks,
            "the sequence-parallel pass changed the ranks' graphs in different ways, and running them would hang. "
            f"Rank 0: {summaries[0]}. Rank {other}: {summaries[other]}. Make all ranks run the same code, or compile "
            "this module without the pass",
        )


def _difference(ranks: _Ranks, sentence: str) -> RanksDifferError:
    ranks.differ = True
    return RanksDifferError(sentence)
