"""Find RMSNorms in a graph, either as a single op or as the ops that torch decomposes it into.

The eps of a norm may be any value, including an input of the graph.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims

# Ops that change only the dtype or the shape of a value.
_CARRIERS = {
    prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of a graph."""

    node: Node  # the norm's op, or the (reciprocal) square root of the mean of squares
    normed: Node  # the value that is normalised

    def has_other_users(self) -> bool:
        """True if any op outside the norm uses the normalised value."""
        pending, own = [self.normed], {self.normed}
        while pending:
            for user in pending.pop().users:
                if user in own or self._is_of_norm(user):
                    continue
                if user.target not in _CARRIERS:
                    return True
                own.add(user)
                pending.append(user)
        return False

    def _is_of_norm(self, user: Node) -> bool:
        if user is self.node or _squared(user) is not None:
            return True
        # x times the reciprocal root, or x divided by the root.
        return any(carried(arg) is self.node for arg in user.all_input_nodes)


def carried(node: Node) -> Node:
    """Return the node whose value `node` only reshapes or converts, otherwise `node` itself."""
    while node.target in _CARRIERS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def find_norms(graph: Graph, ops: Collection[OpOverload]) -> Iterator[Norm]:
    """Yield the norms of a graph.

    Args:
        ops: Custom ops that are RMSNorms of their first operand, in addition to torch's own.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_norm = node.target is aten._fused_rms_norm.default or node.target in ops
        normed = node.args[0] if is_norm else _normed(node)
        if isinstance(normed, Node):
            yield Norm(node, carried(normed))


def _normed(node: Node) -> Node | None:
    """Return x if a node is rsqrt(mean(x * x) + eps) or sqrt(mean(x * x) + eps), otherwise None."""
    rooted = node.target in (aten.rsqrt.default, aten.sqrt.default) or (
        node.target is aten.pow.Tensor_Scalar and node.args[1] in (-0.5, 0.5)
    )
    if not rooted:
        return None
    total = node.args[0]
    if not isinstance(total, Node) or total.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    for mean in total.all_input_nodes:
        mean = carried(mean)
        if mean.target is aten.mean.dim and isinstance(mean.args[0], Node):
            return _squared(carried(mean.args[0]))
    return None


def _squared(node: Node) -> Node | None:
    powered = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    multiplied = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    squared = node.args[0] if powered or multiplied else None
    return squared if isinstance(squared, Node) else None
