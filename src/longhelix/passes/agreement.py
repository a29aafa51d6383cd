"""That ranks have changed their graphs alike. They tell each other before a graph runs, since none would come out of a
collective that another does not run."""

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

# Which numbers of a module are constants of its graph, and which are operands, torch may decide by the order of a set,
# which every process has its own of.
_FLOAT = "a number"

KIND = "graph"  # of counts, as `SequenceParallel` keeps them: their names are summaries


class RanksDifferError(TorchRuntimeError):
    """The ranks of a group would run other collectives, or compute their token shards in other ways."""


def summary(options: str, graph_lines: list[str], after: list[Collective]) -> str:
    """What all ranks must have alike of a graph: a digest, and what a reader can compare. options: the pass's, in
    words."""
    text = "\n".join((options, *graph_lines, *(f"{each.name} {each.dtype}" for each in after)))
    counts = Counter(each.name for each in after)
    said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no collectives"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{said}, {len(graph_lines)} ops on token shards ({options}; {digest})"


def lines(graph: Graph, plan: ShardingPlan) -> Iterator[str]:
    """A line for each node that is on token shards, the same on ranks whose shards are computed alike."""
    numbers = {node: number for number, node in enumerate(node for node in graph.nodes if node in _on_shards(plan))}
    for node, number in numbers.items():
        source = plan.region.sources.get(node)
        after = " gathered" * (node in plan.gathered) + " quantised" * (node in plan.quantised)
        if source is not None:
            yield f"{number}: {'all-gather' if isinstance(source, Gathered) else 'all-reduce'}{after}"
        elif node in plan.sharded:
            call = plan.region.calls[node]
            named = {name: _said(each, numbers) for name, each in sorted(call.named.items())}
            yield f"{number}: {node.target} {_said(call.arguments, numbers)} {named}{after}"
        else:
            yield f"{number}: rows of {numbers.get(dict(plan.chunks)[node])}"


def _on_shards(plan: ShardingPlan) -> set[Node]:
    return {*plan.sharded, *(source.node for source in plan.sources), *(chunk for chunk, _ in plan.chunks)}


def _said(argument: Any, numbers: dict[Node, int]) -> str:
    """An argument of a call on a shard. Of values that are none, only what ranks have alike: not their sizes."""
    if isinstance(argument, ShardOperand):
        return f"%{numbers.get(argument.node)}"
    if isinstance(argument, OwnRows):
        return "rows of " + _said(argument.node, numbers)
    if isinstance(argument, Squeezed):
        return _said(argument.node, numbers)
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
        return "(" + ", ".join(_said(each, numbers) for each in argument) + ")"
    return repr(argument)


@dataclass
class _Ranks:
    """A group's ranks, where they tell each other, and the summaries that all of them have had."""

    group: PassGroup
    store: dist.Store
    agreed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    differ: bool = False


@dataclass(frozen=True)
class _Compiling:
    """A compilation, and what had been counted before."""

    context: CompileContext
    ranks: _Ranks
    before: Counter[str]


_ranks: dict[str, _Ranks] = {}  # by the group's name
_compiling: dict[str, "_Compiling"] = {}  # by the prefix of a pass's counts


def expect(prefix: str, group: PassGroup) -> None:
    """Something is compiled now: what is counted under the prefix has to be agreed on before it runs."""
    context = CompileContext.try_get()
    # One that has failed midway may have left its entry.
    if context is None or (prefix in _compiling and _compiling[prefix].context is context):
        return
    store = _get_default_store()
    if group.name not in _ranks or _ranks[group.name].store is not store:
        _ranks[group.name] = _Ranks(group, store)
    _compiling[prefix] = _Compiling(context, _ranks[group.name], Counter(counters["inductor"]))


def differ(group: PassGroup) -> bool:
    """Whether the group's ranks have been found to differ."""
    return group.name in _ranks and _ranks[group.name].differ


def _compare(_: CodeType, __: CodeType) -> None:
    """What was compiled is about to run. Raises RanksDifferError."""
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


# Torch runs it after it has compiled a function, or taken it from its cache, and before that runs.
register_bytecode_hook(_compare)


def _agree(ranks: _Ranks, own: list[str]) -> None:
    group = ranks.group
    place = f"longhelix.passes/{group.name}"
    # Counted in the store, which may be older than these ranks.
    where = f"{place}/{ranks.store.add(f'{place}/times/{group.rank}', 1)}"
    ranks.store.set(f"{where}/{group.rank}", "; ".join(own))
    said = []
    for rank in range(group.size):
        try:
            said.append(ranks.store.get(f"{where}/{rank}").decode())
        except RuntimeError as error:  # of whichever kind the store has
            ranks.store.set(f"{where}/{group.rank}", "gave up")  # for a rank that comes later
            raise _difference(
                ranks,
                f"rank {rank} of {group.size} has not compiled the graph that this one has: {'; '.join(own)}. Make all "
                "ranks run the same code",
            ) from error
    other = next((rank for rank in range(group.size) if said[rank] != said[0]), None)
    if other is not None:
        raise _difference(
            ranks,
            "sequence parallelism would change the ranks' graphs in different ways, so that they would wait for each "
            f"other for ever. Rank 0: {said[0]}. Rank {other}: {said[other]}. Make all ranks run the same code, or "
            "compile this module without the pass",
        )


def _difference(ranks: _Ranks, sentence: str) -> RanksDifferError:
    ranks.differ = True
    return RanksDifferError(sentence)
