"""Find the part of a graph that could run on token shards.

This part starts at the results of all-reduces and all-gathers, and continues through token-wise ops."""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from longhelix.passes.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    PassGroup,
    group_of,
    is_first_item,
    waited,
)
from longhelix.passes.rules import NotTokenWiseError, Rules, ShardedCall
from longhelix.passes.tokens import TokenDims, first_value, same, shard_rows

aten = torch.ops.aten


_CUTTING = {aten.constant_pad_nd.default, aten.split.Tensor, aten.split_with_sizes.default}


@dataclass(frozen=True)
class Reduced:
    """The result of an all-reduce. A reduce-scatter in its place would give each rank a shard of this result."""

    node: Node
    tokens: TokenDims
    collective: Node


@dataclass(frozen=True)
class Gathered:
    """The result of an all-gather, with or without its padding."""

    node: Node
    tokens: TokenDims
    collective: Node
    shard: Node  # the operand of the all-gather


Source = Reduced | Gathered


@dataclass(frozen=True)
class Region:
    """The nodes that a rank can compute for its own tokens without another collective."""

    tokens: Mapping[Node, TokenDims]  # each node of the region -> the dims that hold its tokens
    sources: Mapping[Node, Source]  # each result of a collective in the region -> that collective
    calls: Mapping[Node, ShardedCall]  # each other node -> how to compute its shard from the shards of its operands
    chunks: Mapping[Node, Node]  # each node that already is a token shard -> the full node
    reasons: Mapping[Node, str]  # each op outside the region that uses a value of the region -> why the op is outside

    def upstream(self, node: Node) -> list[Node]:
        """Return the operands of a node that are in the region."""
        return [] if node in self.sources else [arg for arg in node.all_input_nodes if arg in self.tokens]

    def downstream(self, node: Node) -> list[Node]:
        """Return the users of a node that are in the region."""
        return [user for user in node.users if user in self.calls]

    def outside(self, node: Node) -> list[Node]:
        """Return the users of a node that need all of its tokens."""
        return [user for user in node.users if user not in self.calls and not self._leads_to_chunks(user, node)]

    def _leads_to_chunks(self, user: Node, node: Node) -> bool:
        """True if `user` only pads or splits `node` to take a token shard of `node`."""
        if self.chunks.get(user) is node:
            return True
        return user.target in _CUTTING and all(self._leads_to_chunks(each, node) for each in user.users)


def computes(user: Node) -> bool:
    """True if a node computes a value. The graph's output and copies into graph inputs do not."""
    if user.target is aten.copy.default:  # the functional form of a copy into an input
        return any(map(computes, user.users))
    return user.op != "output" and user.target is not aten.copy_.default


def find_region(graph: Graph, group: PassGroup, rules: Rules, own_chunks: bool, left: Collection[Node] = ()) -> Region:
    """Find the region that follows the group's collectives.

    Args:
        own_chunks: Whether the graph itself selects this rank's rows of values.
        left: Sources that must not be part of the region.
    """
    known = {source.node: source for source in _sources(graph, group)}
    varying = _varying(graph, rules, known.keys())
    sources = {node: source for node, source in known.items() if node not in left}
    chunked = [node for node in graph.nodes if own_chunks and node not in known]
    barred: set[Node] = set()
    while True:
        region = _grow(
            graph, group=group, rules=rules, sources=sources, varying=varying, barred=barred, may_be_chunks=set(chunked)
        )
        added = _summed_again(graph, group, region) - barred
        if not added:
            return region
        barred |= added


def _grow(
    graph: Graph,
    group: PassGroup,
    rules: Rules,
    sources: Mapping[Node, Source],
    varying: set[Node],
    barred: set[Node],
    may_be_chunks: set[Node],
) -> Region:
    tokens = {node: source.tokens for node, source in sources.items()}
    calls: dict[Node, ShardedCall] = {}
    chunks: dict[Node, Node] = {}
    reasons: dict[Node, str] = {}
    for node in graph.nodes:
        if node in sources or node.op != "call_function":
            continue
        chunked = _chunked(node, tokens, group) if node in may_be_chunks else None
        if chunked is not None:
            chunks[node] = chunked
            continue
        if not any(arg in tokens for arg in node.all_input_nodes):
            continue
        if node in barred:
            reasons[node] = f"{node.target} adds a full value to one that is summed over the ranks again"
            continue
        try:
            call = rules.call(node, tokens, varying.__contains__)
        except NotTokenWiseError as error:
            reasons[node] = str(error)
            continue
        calls[node] = call
        value = first_value(node)
        assert value is not None
        tokens[node] = TokenDims.of(value, call.dims)
    return Region(tokens=tokens, sources=sources, calls=calls, chunks=chunks, reasons=reasons)


def _sources(graph: Graph, group: PassGroup) -> list[Source]:
    found: list[Source] = []
    for node in graph.nodes:
        collective = waited(node)
        if collective is None or group_of(collective) != group.name:
            continue
        value = node.meta["val"]
        if collective.target is ALL_REDUCE and collective.args[1] == "sum" and value.dim() > 1:
            if list(collective.users) == [node]:
                found.append(Reduced(node, TokenDims.of(value, value.dim() - 1), collective))
        elif collective.target is ALL_GATHER and value.dim() > 1:
            shard = collective.args[0]
            assert isinstance(shard, Node)
            found += [Gathered(cut, tokens, collective, shard) for cut, tokens in _cuts(node, group)]
    return found


def _cuts(gathered: Node, group: PassGroup) -> list[tuple[Node, TokenDims]]:
    """Return an all-gathered value and the slices of the value that remove its padding, each with its token dims."""
    value = gathered.meta["val"]
    found = [(gathered, TokenDims.of(value, 1))]
    for user in gathered.users:
        cut = user
        if user.target is aten.split_with_sizes.default and _dim_of(user) == 0:
            cut = next(filter(is_first_item, user.users), user)
        elif user.target is not aten.slice.Tensor or not _is_of_first_rows(user):
            continue
        left = cut.meta["val"]
        if cut is not user or user.target is aten.slice.Tensor:
            rows = shard_rows(left.shape[0], group.size)
            if same(rows * group.size, value.shape[0]):
                found.append((cut, TokenDims.of(left, 1)))
    return found


def _is_of_first_rows(node: Node) -> bool:
    """True if a slice takes the first rows, without gaps."""
    return _dim_of(node) == 0 and node.args[2] in (0, None) and (len(node.args) < 5 or node.args[4] == 1)


def _dim_of(node: Node) -> object:
    index = 1 if node.target is aten.slice.Tensor else 2
    return node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)


def _chunked(node: Node, tokens: Mapping[Node, TokenDims], group: PassGroup) -> Node | None:
    """If `node` is this rank's token shard of another node, with or without padding, return the other node."""
    whole = _whole(node, group)
    if whole is None:
        return None
    source = whole.args[0] if _pads_at_the_end(whole) else whole
    if not isinstance(source, Node) or source not in tokens or tokens[source].dims != 1:
        return None
    rows = shard_rows(tokens[source].count, group.size)
    part, padded = node.meta["val"], whole.meta["val"]
    right = same(part.shape[0], rows) and same(padded.shape[0], rows * group.size)
    return source if right and part.shape[1:] == source.meta["val"].shape[1:] else None


def _pads_at_the_end(node: Node) -> bool:
    """True if a node only appends rows of zeros to another node."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    *others, before, _ = node.args[1]  # type: ignore[misc]
    return not any(others) and before == 0 and (len(node.args) < 3 or node.args[2] == 0)


def _whole(node: Node, group: PassGroup) -> Node | None:
    """If `node` is this rank's part of an evenly split value, return that value, otherwise None."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and node.args[1] == group.rank and isinstance(source, Node):
        even = source.target is aten.split.Tensor or (
            source.target is aten.split_with_sizes.default and len(set(source.args[1])) == 1  # type: ignore[arg-type]
        )
        whole = source.args[0] if even and _dim_of(source) == 0 else None
        return whole if isinstance(whole, Node) else None
    if node.target is aten.slice.Tensor and _dim_of(node) == 0 and isinstance(source, Node) and len(node.args) < 5:
        start = node.args[2] if len(node.args) > 2 else 0
        begin = start.meta["val"] if isinstance(start, Node) else start or 0
        return source if same(begin, node.meta["val"].shape[0] * group.rank) else None
    return None


def _varying(graph: Graph, rules: Rules, sources: Collection[Node]) -> set[Node]:
    """Return the nodes that may have different values on different ranks.

    Graph inputs that are combined with summed values (weights of norms, biases, hidden states) count as the same on all
    ranks. Matrix products of these inputs may vary, because ranks may hold different weights.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in sources:
            continue
        if not rules.same_everywhere(node) or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _summed_again(graph: Graph, group: PassGroup, region: Region) -> set[Node]:
    """Return the nodes that combine an operand of an all-reduce with a full value.

    Such a full value is one rank's part of a sum, so it may differ between ranks.
    """
    summed = [
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and node.target in (ALL_REDUCE, REDUCE_SCATTER) and group_of(node) == group.name
    ]
    seen: set[Node] = set()
    pending = [node for node in summed if isinstance(node, Node) and node in region.calls]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [arg for arg in region.upstream(node) if arg in region.calls]
    return {node for node in seen if set(node.all_input_nodes) - region.tokens.keys()}
