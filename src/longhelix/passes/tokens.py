"""How a value of a graph holds tokens, and what a token shard of it looks like.

A value (B, S, H) or (T, H) holds T tokens in its leading dims. To shard the value over n ranks, these dims are
flattened into T rows. The token shard (L, H) of rank r has the rows [r L, (r + 1) L) with L = ceil(T / n). If n does
not divide T, the last rows are padding. A shard may consist of padding only.
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
    """The leading dims of a value that hold its tokens."""

    sizes: tuple[int | torch.SymInt, ...]  # sizes of these dims

    @classmethod
    def of(cls, value: Tensor, dims: int) -> "TokenDims":
        """Return the token dims of a value that holds tokens in its first `dims` dims."""
        return cls(tuple(value.shape[:dims]))

    @property
    def count(self) -> int | torch.SymInt:
        """The number of tokens, T."""
        return prod(self.sizes)

    @property
    def dims(self) -> int:
        return len(self.sizes)

    def matches(self, other: "TokenDims") -> bool:
        """True if both values hold the same number of tokens, in the same number of dims."""
        return self.dims == other.dims and same(self.count, other.count)


def shard_rows(count: int | torch.SymInt, ranks: int) -> int | torch.SymInt:
    """Return the number of rows of a token shard, L = ceil(T / n)."""
    return (count + ranks - 1) // ranks


@contextlib.contextmanager
def any_number_of_tokens(graph: Graph) -> Iterator[None]:
    """Return a context manager inside which comparisons of sizes are valid for every number of tokens.

    A comparison, such as a test whether a size is 1, does not use the number of tokens with which the graph was traced.
    It does not restrict the graph to that number either.
    """
    fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    env = None if fake is None else fake.shape_env
    unbound = contextlib.nullcontext() if env is None else env.suppress_guards()
    with enable_python_dispatcher(), unbound, symbols.patch(backed_size_oblivious=True):
        yield


def same(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """True if two sizes are equal for every number of tokens that a graph accepts."""
    return statically_known_true(sym_eq(one, other))


def first_value(node: Node) -> Tensor | None:
    """Return the first tensor that a node returns, or None if the node returns no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((each for each in value if isinstance(each, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def row_bytes(node: Node, tokens: TokenDims) -> int | None:
    """Return the number of bytes per token of a value, or None if it is not known at compile time."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    size = prod(value.shape[tokens.dims :]) * value.element_size()
    return size if isinstance(size, int) else None
