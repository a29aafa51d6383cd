"""Remove ops without an effect from a graph, because the pass cannot recognise patterns that contain such ops."""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from longhelix.passes.tokens import same

aten, prims = torch.ops.aten, torch.ops.prims

_RESHAPING = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.alias.default,
    aten.constant_pad_nd.default,
}
_CONVERTING = {prims.convert_element_type.default, aten._to_copy.default}


def eliminate_no_ops(graph: Graph) -> int:
    """Replace ops without an effect, and return the number of replaced ops.

    Such ops are views and slices that keep the shape, padding by zero rows, conversions that keep the dtype, and sizes
    that are also inputs of the graph. The function keeps ops that read an input of the graph or produce an output.
    Without these ops, an output could be an input or share memory with an input.
    """
    sizes: list[Node] = []
    removed = 0
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.SymInt):
            sizes.append(node)
        if node.op != "call_function":
            continue
        if node.target is aten.sym_size.int:
            instead = next((size for size in sizes if same(size.meta["val"], value)), None)
        else:
            instead = node.args[0] if _does_nothing(node) else None
        if isinstance(instead, Node):
            node.replace_all_uses_with(instead)
            graph.erase_node(node)
            removed += 1
    return removed


def _does_nothing(node: Node) -> bool:
    source = node.args[0] if node.args else None
    value = node.meta.get("val")
    if not isinstance(source, Node) or not isinstance(value, Tensor):
        return False
    before = source.meta.get("val")
    if not isinstance(before, Tensor) or node.target not in _RESHAPING | _CONVERTING:
        return False
    if source.op == "placeholder" or any(user.op == "output" for user in node.users):
        return False
    if node.target is aten.constant_pad_nd.default and any(amount != 0 for amount in node.args[1]):  # type: ignore[union-attr]
        return False
    alike = before.dtype == value.dtype and before.device == value.device and before.dim() == value.dim()
    return alike and all(map(same, before.shape, value.shape)) and all(map(same, before.stride(), value.stride()))
