"""Find the functional collectives of a torch graph, name them, and count the bytes that they send."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx import Graph, Node

from longhelix.passes import pieces

functional = torch.ops._c10d_functional
WAIT = functional.wait_tensor.default
ALL_REDUCE = functional.all_reduce.default
REDUCE_SCATTER = functional.reduce_scatter_tensor.default
ALL_GATHER = functional.all_gather_into_tensor.default
ALL_TO_ALL = functional.all_to_all_single.default

_NAMES = {
    pieces.ALL_GATHER: "all_gather",
    pieces.ALL_TO_ALL: "all_to_all",
    ALL_REDUCE: "all_reduce",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_GATHER: "all_gather",
    ALL_TO_ALL: "all_to_all",
}


@dataclass(frozen=True)
class PassGroup:
    """The process group whose collectives a pass changes."""

    name: str  # as it appears in graphs
    size: int  # number of ranks
    rank: int  # this process's rank in the group


@dataclass(frozen=True)
class Collective:
    """One collective of a graph."""

    name: str
    dtype: str
    # Bytes that a rank sends to other ranks, in a ring or directly. If the number of tokens varies, these are the bytes
    # for the number of tokens with which the graph was traced.
    sent_bytes: int


def waited(node: Node) -> Node | None:
    """Return the collective that a node waits for, or None if the node is not a wait."""
    if node.op == "call_function" and node.target is WAIT:
        collective = node.args[0]
        assert isinstance(collective, Node)
        return collective
    return None


def group_of(node: Node) -> str:
    """Return the name of a collective's group."""
    name = node.args[-1]
    return name if isinstance(name, str) else str(name)


def collectives(graph: Graph, group: PassGroup) -> Iterator[Collective]:
    """Yield the collectives of `graph` that run in `group`."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _NAMES and group_of(node) == group.name:
            operand = node.args[0]
            assert isinstance(operand, Node)
            value = operand.meta["val"]
            yield Collective(_NAMES[node.target], _dtype(value), _sent(node, value, group.size))


def _sent(node: Node, value: Tensor, ranks: int) -> int:
    given = prod(_hint(size) for size in value.shape) * value.element_size()
    if node.target is ALL_REDUCE:
        return 2 * given * (ranks - 1) // ranks
    if node.target in (ALL_GATHER, pieces.ALL_GATHER):
        return given * (ranks - 1)
    return given * (ranks - 1) // ranks


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint or 0


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def is_first_item(node: Node) -> bool:
    """True if a node selects the first result of an op with several results."""
    return node.op == "call_function" and node.target is operator.getitem and node.args[1] == 0
