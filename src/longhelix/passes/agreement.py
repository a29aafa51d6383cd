"""That ranks have changed their graphs alike. They tell each other before a graph runs, since none would come out of a
collective that another does not run."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx import Graph, Node

from longhelix.passes.collectives import Collective, RankGroup
from longhelix.passes.plan import Plan
from longhelix.passes.region import Gathered
from longhelix.passes.rules import Chunk, Shard, ShardRows, Squeezed

KIND = "graph"  # of counts, as `SequenceParallel` keeps them: their names are summaries


class RanksDifferError(TorchRuntimeError):
    """The ranks of a group would run other collectives, or compute their token shards in other ways."""


def summary(graph_lines: list[str], after: list[Collective]) -> str:
    """What all ranks must have alike of a graph: a digest, and what a reader can compare."""
    text = "\n".join((*graph_lines, *(f"{each.name} {each.dtype}" for each in after)))
    counts = Counter(each.name for each in after)
    said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no collectives"
    return f"{said}, {len(graph_lines)} ops on token shards ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def lines(graph: Graph, plan: Plan) -> Iterator[str]:
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


def _on_shards(plan: Plan) -> set[Node]:
    return {*plan.sharded, *(source.node for source in plan.sources), *(chunk for chunk, _ in plan.chunks)}


def _said(argument: Any, numbers: dict[Node, int]) -> str:
    """An argument of a call on a shard. Of values that are none, only what ranks have alike: not their sizes."""
    if isinstance(argument, Shard):
        return f"%{numbers.get(argument.node)}"
    if isinstance(argument, Chunk):
        return "rows of " + _said(argument.node, numbers)
    if isinstance(argument, Squeezed):
        return _said(argument.node, numbers)
    if isinstance(argument, ShardRows):
        return "L"
    if isinstance(argument, Node):
        value = argument.meta["val"]
        return str(getattr(value, "dtype", type(value).__name__))
    if isinstance(argument, (list, tuple)):
        return "(" + ", ".join(_said(each, numbers) for each in argument) + ")"
    return repr(argument)


@dataclass
class _Ranks:
    """A group's ranks, where they tell each other, how often they did, and the summaries that all of them have had."""

    group: RankGroup
    store: dist.Store
    times: int = 0
    agreed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    differ: bool = False


_ranks: dict[str, _Ranks] = {}  # by the group's name
_compiling: dict[str, tuple[_Ranks, Counter[str]]] = {}  # and what was counted before, by the prefix of a pass's counts


def expect(prefix: str, group: RankGroup) -> None:
    """Something is compiled now: what is counted under the prefix has to be agreed on before it runs."""
    store = _get_default_store()
    if group.name not in _ranks or _ranks[group.name].store is not store:
        _ranks[group.name] = _Ranks(group, store)
    _compiling.setdefault(prefix, (_ranks[group.name], Counter(counters["inductor"])))


def differ(group: RankGroup) -> bool:
    """Whether the group's ranks have been found to differ."""
    return group.name in _ranks and _ranks[group.name].differ


def _compare(_: CodeType, __: CodeType) -> None:
    """What was compiled is about to run. Raises RanksDifferError."""
    compiling = dict(_compiling)
    _compiling.clear()
    for prefix, (ranks, before) in compiling.items():
        start = f"{prefix}/{KIND}/"
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
    group, where = ranks.group, f"longhelix.passes/{ranks.group.name}/{ranks.times}"
    ranks.times += 1
    ranks.store.set(f"{where}/{group.rank}", "; ".join(own))
    said = []
    for rank in range(group.size):
        try:
            said.append(ranks.store.get(f"{where}/{rank}").decode())
        except RuntimeError as error:  # of whichever kind the store has
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
