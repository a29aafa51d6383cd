"""Apply a plan to a graph: add new nodes next to the old nodes, then replace the old nodes or undo the change."""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from longhelix.passes import pieces
from longhelix.passes.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, WAIT, PassGroup, waited
from longhelix.passes.plan import ShardingPlan
from longhelix.passes.region import Gathered, Reduced
from longhelix.passes.rules import OwnRows, ShardOperand, ShardRows, Squeezed
from longhelix.passes.scales import LARGEST, OBSERVED, SentFormat
from longhelix.passes.tokens import TokenDims, same, shard_rows

aten, prims = torch.ops.aten, torch.ops.prims
Size = int | Node

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Rewrite:
    """The changes of a plan to a graph.

    Call `prepare`, then check `doubts`, then call `finish` or `abandon`.

    Args:
        in_rank_order: Whether each rank receives its rows from all ranks and adds them up in rank order.
        in_pieces: Whether large messages may be sent in pieces.
        quantisation: How to send the values that the plan quantises.
    """

    def __init__(
        self,
        graph: Graph,
        plan: ShardingPlan,
        group: PassGroup,
        in_rank_order: bool,
        in_pieces: bool,
        quantisation: SentFormat | None,
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._group = group
        self._in_rank_order = in_rank_order
        self._in_pieces = in_pieces
        self._quantisation = quantisation
        self._num_quantised = 0
        self._at: Node | None = None
        self._fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        self._added: list[Node] = []
        self._shards: dict[Node, Node] = {}
        self._rows: dict[tuple[Node, int], Node] = {}  # (full value, its token dims) -> this rank's rows
        self._whole: dict[Node, Node] = {}
        self._chunks: dict[Node, Node] = {}
        self._counts: dict[object, tuple[Size, Size, Size]] = {}

    def prepare(self) -> None:
        """Add all new nodes, and leave the old ones unchanged."""
        chunks = dict(self._plan.chunks)
        for node in list(self._graph.nodes):
            self._at = node
            if node in self._plan.sharded:
                self._shards[node] = self._shard(node)
            if node in self._plan.gathered:
                self._whole[node] = self._gather(node)
            if node in chunks:
                self._chunks[node] = self._without_padding(self._shard_of(chunks[node]), chunks[node])

    def replaced(self) -> dict[Node, Node]:
        """Return the new node for each old node that is replaced."""
        return self._whole | self._chunks

    def abandon(self) -> None:
        """Remove the new nodes again."""
        for node in reversed(self._added):
            self._graph.erase_node(node)

    def finish(self) -> None:
        """Replace the old nodes with the new ones, and remove nodes that nothing uses any more."""
        for old, new in self.replaced().items():
            old.replace_all_uses_with(new, propagate_meta=False)
        collectives = {source.collective for source in self._plan.region.sources.values()}
        for node in reversed(list(self._graph.nodes)):
            if node.users or node.op != "call_function":
                continue
            if node in collectives or waited(node) in collectives or not node.is_impure():
                self._graph.erase_node(node)

    # The following methods add nodes that compute one shard.

    def _shard(self, node: Node) -> Node:
        source = self._plan.region.sources.get(node)
        if isinstance(source, Gathered):
            return source.shard
        if isinstance(source, Reduced):
            return self._scattered(source)
        call = self._plan.region.calls[node]
        tokens = self._plan.region.tokens[node]
        arguments, named = map_aggregate((call.arguments, dict(call.named)), lambda each: self._operand(each, tokens))
        return self._add(node.target, *arguments, **named)

    def _operand(self, argument: Any, tokens: TokenDims) -> Any:
        if isinstance(argument, ShardOperand):
            return self._shard_of(argument.node)
        if isinstance(argument, OwnRows):
            return self._rows_of(argument.node, argument.tokens)
        if isinstance(argument, Squeezed):
            value = argument.node.meta["val"]
            sizes = value.shape[value.dim() - argument.dims :]
            return self._add(aten.view.default, argument.node, [self._size(size) for size in sizes])
        return self._sizes(tokens)[1] if isinstance(argument, ShardRows) else argument

    def _shard_of(self, node: Node) -> Node:
        if node in self._shards:
            return self._shards[node]
        source = self._plan.region.sources[node]
        return source.shard if isinstance(source, Gathered) else self._rows_of(node, source.tokens)

    def _rows_of(self, node: Node, tokens: TokenDims) -> Node:
        """Return this rank's rows of a full value."""
        key = node, tokens.dims
        if key not in self._rows:
            parts = self._add(
                aten.split_with_sizes.default, self._padded(node, tokens), [self._sizes(tokens)[1]] * self._group.size
            )
            self._rows[key] = self._item(parts, self._group.rank)
        return self._rows[key]

    def _without_padding(self, shard: Node, node: Node) -> Node:
        """Return a shard with zeros in its padding rows, like the shards that the graph itself creates."""
        count, rows, padding = self._sizes(self._plan.region.tokens[node])
        if padding == 0:
            return shard
        value = shard.meta["val"]
        first = self._add(operator.mul, rows, self._group.rank) if isinstance(rows, Node) else rows * self._group.rank
        named = {"start": first, "step": 1, "dtype": torch.int64, "device": value.device, "requires_grad": False}
        held = self._add(aten.lt.Scalar, self._add(prims.iota.default, rows, **named), count)
        held = self._add(aten.view.default, held, [rows, *[1] * (value.dim() - 1)])
        zero = self._add(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        return self._add(aten.where.self, held, shard, zero)

    def _scattered(self, source: Reduced) -> Node:
        """Return this rank's rows of a sum over the ranks."""
        given = source.collective.args[0]
        assert isinstance(given, Node)
        padded, ranks = self._padded(given, source.tokens), self._group.size
        if not self._in_rank_order:
            return self._wait(self._add(REDUCE_SCATTER, padded, "sum", ranks, self._group.name))
        rows = self._sizes(source.tokens)[1]
        if self._in_pieces:
            received = self._add(pieces.ALL_TO_ALL, padded, ranks, self._group.name)
        else:
            received = self._wait(self._add(ALL_TO_ALL, padded, [rows] * ranks, [rows] * ranks, self._group.name))
        dtype = given.meta["val"].dtype
        parts = self._add(aten.split_with_sizes.default, received, [rows] * ranks)
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        total = self._converted(self._item(parts, 0), wide)
        for rank in range(1, ranks):
            total = self._add(aten.add.Tensor, total, self._converted(self._item(parts, rank), wide))
        return self._converted(total, dtype)

    def doubts(self) -> list[str]:
        """Describe errors in the new nodes, such as wrong shapes. The list is empty if the rules are correct."""
        found = []
        for old, new in self.replaced().items():
            before, after = old.meta["val"], new.meta["val"]
            alike = before.dtype == after.dtype and _all_same(before.shape, after.shape)
            if not (alike and _all_same(before.stride(), after.stride())):
                found.append(f"{new.name} would replace {old.name} with another shape or dtype")
        for node, shard in self._shards.items():
            tokens = self._plan.region.tokens[node]
            whole, own = node.meta["val"], shard.meta["val"]
            if isinstance(whole, Tensor):
                rest = whole.shape[tokens.dims :]
                rows = shard_rows(tokens.count, self._group.size)
                if whole.dtype != own.dtype or not _all_same((rows, *rest), own.shape):
                    found.append(f"{shard.name} does not have the shape and dtype of a token shard of {node.name}")
        return found

    # The following methods add nodes that gather all tokens.

    def _gather(self, node: Node) -> Node:
        tokens, shard = self._plan.region.tokens[node], self._shards[node]
        value = node.meta["val"]
        if node in self._plan.quantised:
            return self._shaped(self._gather_quantised(shard, node), node)
        if value.dtype.itemsize == 1 and value.dtype.is_floating_point:  # some backends cannot send float8
            as_bytes = self._gathered(self._add(aten.view.dtype, shard, torch.uint8), tokens)
            return self._shaped(self._add(aten.view.dtype, as_bytes, value.dtype), node)
        return self._shaped(self._gathered(shard, tokens), node)

    def _gather_quantised(self, shard: Node, node: Node) -> Node:
        """Gather the quantised shards of a node. Unless scales are static, also gather a scale for each row."""
        assert self._quantisation is not None
        tokens = self._plan.region.tokens[node]
        name, static = self._quantisation.name, self._quantisation.scales
        dtype, largest, wide = _DTYPES[name], LARGEST[name], torch.float32
        value = shard.meta["val"]
        rows = self._converted(shard, wide)
        scales = self._scales_of(rows, node, largest) if static is None else static[self._num_quantised]
        self._num_quantised += 1
        scaled = self._add(aten.div.Tensor, rows, scales)
        if dtype is torch.int8:
            scaled = self._add(aten.round.default, scaled)
        scaled = self._add(aten.clamp_max.default, self._add(aten.clamp_min.default, scaled, -largest), largest)
        narrow = self._converted(scaled, dtype)
        if dtype is torch.int8:
            narrow = self._gathered(narrow, tokens)
        else:
            narrow = self._gathered(self._add(aten.view.dtype, narrow, torch.uint8), tokens)
            narrow = self._add(aten.view.dtype, narrow, dtype)
        if isinstance(scales, Node):
            scales = self._gathered(scales, tokens)
        back = self._add(aten.mul.Tensor, self._converted(narrow, wide), scales)
        return self._converted(back, value.dtype)

    def _scales_of(self, rows: Node, node: Node, largest: float) -> Node:
        """Return the scale of each row of a node's shard."""
        highest = self._add(aten.amax.default, self._add(aten.abs.default, rows), [-1], True)
        assert self._quantisation is not None
        if self._quantisation.noted is not None:
            seen = self._without_padding(highest, node)
            highest = self._add(OBSERVED, seen, self._quantisation.noted[self._num_quantised])
        return self._add(aten.div.Tensor, self._add(aten.clamp_min.default, highest, 1e-12), largest)

    def _gathered(self, shard: Node, tokens: TokenDims) -> Node:
        """Gather all tokens of a shard into one dim, without padding."""
        given = self._dense(shard), self._group.size, self._group.name
        whole = self._add(pieces.ALL_GATHER, *given) if self._in_pieces else self._wait(self._add(ALL_GATHER, *given))
        count, _, padding = self._sizes(tokens)
        if padding == 0:
            return whole
        return self._item(self._add(aten.split_with_sizes.default, whole, [count, padding]), 0)

    def _shaped(self, whole: Node, like: Node) -> Node:
        """Give a gathered value the shape of the node that it replaces."""
        value = like.meta["val"]
        if whole.meta["val"].dim() != value.dim():
            whole = self._add(aten.view.default, whole, [self._size(size) for size in value.shape])
        return whole

    def _dense(self, node: Node) -> Node:
        value = node.meta["val"]
        dense = [prod(value.shape[dim + 1 :]) for dim in range(value.dim())]
        if _all_same(value.stride(), dense):
            return node
        return self._add(aten.clone.default, node, memory_format=torch.contiguous_format)

    # The following methods compute sizes, and are helpers for the methods above.

    def _padded(self, node: Node, tokens: TokenDims) -> Node:
        """Return a value with its tokens in one dim, padded to a multiple of the number of ranks."""
        value, (count, _, padding) = node.meta["val"], self._sizes(tokens)
        rest = [self._size(size) for size in value.shape[tokens.dims :]]
        if tokens.dims > 1:
            node = self._add(aten.reshape.default, self._dense(node), [count, *rest])
        if padding == 0:
            return node
        return self._add(aten.constant_pad_nd.default, node, [0, 0] * len(rest) + [0, padding])

    def _sizes(self, tokens: TokenDims) -> tuple[Size, Size, Size]:
        """Return T, L and the number of padding rows, each as a number or as a node that computes the number."""
        count, ranks = tokens.count, self._group.size
        if isinstance(count, int):
            rows = shard_rows(count, ranks)
            return count, rows, rows * ranks - count
        key = count.node.expr
        if key not in self._counts:
            size, *more = map(self._size, tokens.sizes)
            for factor in more:
                size = self._add(operator.mul, size, factor)
            rows = self._add(operator.floordiv, self._add(operator.add, size, ranks - 1), ranks)
            padding = self._add(operator.sub, self._add(operator.mul, rows, ranks), size)
            self._counts[key] = size, rows, padding
        return self._counts[key]

    def _size(self, size: int | torch.SymInt) -> Size:
        """Return a size as a number, or as a node with that value.

        Raises:
            LookupError: No input of the graph has the size.
        """
        if isinstance(size, int):
            return size
        for node in self._graph.nodes:
            if node is self._at:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and same(value, size):
                return node
            if isinstance(value, Tensor) and node.op == "placeholder":
                dim = next((dim for dim, other in enumerate(value.shape) if same(other, size)), None)
                if dim is not None:
                    return self._add(aten.sym_size.int, node, dim)
        raise LookupError(f"no input of the graph has the size {size}")

    def _converted(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self._add(prims.convert_element_type.default, node, dtype)

    def _wait(self, node: Node) -> Node:
        return self._add(WAIT, node)

    def _item(self, node: Node, index: int) -> Node:
        return self._add(operator.getitem, node, index)

    def _add(self, target: Callable[..., Any] | str, *arguments: Any, **named: Any) -> Node:
        assert self._at is not None
        assert callable(target)
        with self._graph.inserting_before(self._at):
            node = self._graph.call_function(target, arguments, named)
        self._added.append(node)
        values = map_aggregate((arguments, named), lambda each: each.meta["val"] if isinstance(each, Node) else each)
        assert self._fake is not None
        with self._fake:
            node.meta["val"] = target(*values[0], **values[1])  # type: ignore[index]
        return node


def _all_same(sizes: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> bool:
    return len(sizes) == len(others) and all(map(same, sizes, others))
