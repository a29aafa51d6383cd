"""Plan the changes of the pass to a graph, and record why the pass leaves other collectives unchanged."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from longhelix.passes.collectives import PassGroup
from longhelix.passes.cut import cheapest_cut
from longhelix.passes.norms import Norm, find_norms
from longhelix.passes.region import Gathered, Reduced, Region, Source, computes, find_region
from longhelix.passes.rules import Rules

aten = torch.ops.aten

_SCALE_BYTES = 4


@dataclass(frozen=True)
class ShardingPlan:
    """The planned changes to a graph. If an op needs a value for all tokens, it is computed from gathered values."""

    region: Region
    sharded: frozenset[Node]  # nodes computed on token shards
    gathered: frozenset[Node]  # sharded nodes that the pass gathers, because some ops need all tokens
    quantised: frozenset[Node]  # gathered nodes that the pass quantises before it sends them
    norms: tuple[Norm, ...]  # norms computed on shards
    normed: frozenset[Node]  # values that any norm of the graph normalises
    left_alone: tuple[str, ...]  # one sentence for each collective that stays unchanged

    @property
    def sources(self) -> list[Source]:
        """Results of collectives that the changed graph keeps as shards."""
        return [source for node, source in self.region.sources.items() if node in self.sharded]

    @property
    def chunks(self) -> list[tuple[Node, Node]]:
        """Pairs of nodes. The first node is this rank's shard of the second node."""
        return [(chunk, node) for chunk, node in self.region.chunks.items() if self._has_shard(node)]

    def _has_shard(self, node: Node) -> bool:
        return node in self.sharded or isinstance(self.region.sources.get(node), Gathered)


def make_plan(
    graph: Graph,
    group: PassGroup,
    rules: Rules,
    norm_ops: Collection[OpOverload],
    applies: Callable[[int | torch.SymInt], bool],
    quantises: bool,
    own_chunks: bool,
) -> ShardingPlan:
    """Plan the changes to a graph.

    Args:
        rules: Rules that define which ops are token-wise.
        norm_ops: Custom ops that are RMSNorms of their first operand.
        applies: Returns whether the pass keeps values of the given number of tokens as shards.
        quantises: Whether the pass quantises gathered values before it sends them.
        own_chunks: See `find_region`.
    """
    norms = list(find_norms(graph, norm_ops))
    left: dict[Node, str] = {}
    for node, source in find_region(graph, group, rules, own_chunks).sources.items():
        if not applies(source.tokens.count):
            left[node] = f"{_name(source)}: too few tokens, or a number of tokens that is not known to be enough"
    while True:
        region = find_region(graph, group=group, rules=rules, own_chunks=own_chunks, left=left)
        plan = _planned(region, norms, left, quantises)
        useless = _without_norm(plan)
        if not useless:
            return plan
        left |= {node: _reason(region, region.sources[node]) for node in region.sources if node in useless}


def _planned(region: Region, norms: Iterable[Norm], left: dict[Node, str], quantises: bool) -> ShardingPlan:
    demanded = {node for node in region.tokens if any(map(computes, region.outside(node)))}
    try:
        cut = cheapest_cut(region, demanded)
    except nx.NetworkXUnbounded:
        reasons = [f"{_name(source)}: the size of its values' rows is not known" for source in region.sources.values()]
        nothing = frozenset[Node]()
        return ShardingPlan(
            region=region,
            sharded=nothing,
            gathered=nothing,
            quantised=nothing,
            norms=(),
            normed=nothing,
            left_alone=(*left.values(), *reasons),
        )
    whole = _upstream(region, demanded - cut, cut)
    returned = {node for node in region.tokens if region.outside(node)} - whole - cut
    kept = {node for node in cut if node in region.sources}
    gathered = (cut - kept) | returned
    sharded = _upstream(region, gathered | set(region.chunks.values()), kept)
    staying = [_reason(region, source) for node, source in region.sources.items() if node in kept]
    return ShardingPlan(
        region=region,
        sharded=frozenset(sharded),
        gathered=frozenset(gathered),
        quantised=frozenset(node for node in gathered if quantises and _is_wide(node, region.tokens[node].dims)),
        norms=tuple(norm for norm in norms if norm.node in sharded and norm.node not in region.sources),
        normed=frozenset(norm.normed for norm in norms),
        left_alone=(*left.values(), *staying),
    )


def _is_wide(node: Node, dims: int) -> bool:
    """True if quantising a node saves bytes, including its scales, and the node is not an output of the graph."""
    value = node.meta["val"]
    if not value.is_floating_point() or value.dtype.itemsize == 1 or not all(map(computes, node.users)):
        return False
    if value.dim() <= dims:
        return False
    numbers = value.shape[-1]
    return isinstance(numbers, int) and numbers + _SCALE_BYTES < numbers * value.dtype.itemsize


def _upstream(region: Region, nodes: Iterable[Node], until: Collection[Node]) -> set[Node]:
    """Return `nodes` and the nodes of the region that they depend on. The search stops before the nodes in `until`."""
    found: set[Node] = set()
    pending = [node for node in nodes if node not in until]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [arg for arg in region.upstream(node) if arg not in until]
    return found


def _without_norm(plan: ShardingPlan) -> set[Node]:
    """Return the sources for which sharding saves nothing.

    No path of nodes on shards connects such a source with a norm, or with a shard that the graph itself uses.
    """
    linked = nx.Graph()
    linked.add_nodes_from(plan.sharded)
    for node in plan.sharded:
        linked.add_edges_from((arg, node) for arg in plan.region.upstream(node) if arg in plan.sharded)
    useful = {norm.node for norm in plan.norms} | set(plan.region.chunks.values())
    found: set[Node] = set()
    for connected in nx.connected_components(linked):
        if not useful & connected:
            found |= connected & plan.region.sources.keys()
    return found


def _reason(region: Region, source: Source) -> str:
    """Return a sentence that says why a source stays unchanged. The sentence gives up to three causes."""
    seen, pending, reasons = {source.node}, [source.node], []
    while pending:
        node = pending.pop(0)
        reasons += [region.reasons.get(user, f"{user.target} needs all tokens") for user in region.outside(node)]
        for user in region.downstream(node):
            if user not in seen:
                seen.add(user)
                pending.append(user)
    causes = "; ".join(dict.fromkeys(reasons[:3])) or "nothing uses its value"
    return f"{_name(source)}: no RMSNorm on a token shard would profit from it ({causes})"


def _name(source: Source) -> str:
    kind = "all-reduce" if isinstance(source, Reduced) else "all-gather"
    return f"{kind} {source.collective.name}"
