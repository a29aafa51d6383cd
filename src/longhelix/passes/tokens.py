"""How a value of a graph holds tokens, and what a token shard of it looks like.

A value (B, S, H) or (T, H) holds T tokens in its leading dims, flattened. Rank r of n has the rows [r L, (r + 1) L) of
them with L = ceil(T / n): a token shard (L, H), whose last rows are padding where n does not divide T. Ranks may have
padding alone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental import _config as symbols
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq


@dataclass(frozen=True)
class TokenDims:
    """The leading dims of a value that hold tokens, and nothing else: their sizes."""

    sizes: tuple[int | torch.SymInt, ...]

    @classmethod
    def of(cls, value: Tensor, dims: int) -> "TokenDims":
        """Those of a value that holds tokens in its first `dims` dims."""
        return cls(tuple(value.shape[:dims]))

    @property
    def count(self) -> int | torch.SymInt:
        """T."""
        return prod(self.sizes)

    @property
    def dims(self) -> int:
        return len(self.sizes)

    def alike(self, other: "TokenDims") -> bool:
        """Whether both hold the same number of tokens, in as many dims."""
        return self.dims == other.dims and same(self.count, other.count)


def shard_rows(count: int | torch.SymInt, ranks: int) -> int | torch.SymInt:
    """L = ceil(T / n)."""
    return (count + ranks - 1) // ranks


@contextlib.contextmanager
def any_number_of_tokens(graph: Graph) -> Iterator[None]:
    """What is asked of sizes within may not be answered for the number of tokens that the graph was traced with, as
    whether one is 1, and may not bind the graph to that number."""
    fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    env = None if fake is None else fake.shape_env
    unbound = contextlib.nullcontext() if env is None else env.suppress_guards()
    with enable_python_dispatcher(), unbound, symbols.patch(backed_size_oblivious=True):
        yield


def same(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every number of tokens that a graph is for."""
    return statically_known_true(sym_eq(one, other))


def first_value(node: Node) -> Tensor | None:
    """The tensor that a node gives, the first one of several; None for nodes that give no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((each for each in value if isinstance(each, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def row_bytes(node: Node, tokens: TokenDims) -> int | None:
    """Bytes of one token's row of a value; None where they are not known beforehand."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    size = prod(value.shape[tokens.dims :]) * value.element_size()
    return size if isinstance(size, int) else None
