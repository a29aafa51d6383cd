"""How a value of a graph holds tokens, and what a token shard of it looks like.

A value (B, S, H) or (T, H) holds T tokens in its leading dims. Once these are flattened, rank r of n has the rows
[r L, (r + 1) L) with L = ceil(T / n). They are its token shard (L, H). If n does not divide T, the last rows are
padding. A shard may be all padding.
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
        """Whether both hold the same number of tokens, in as many dims."""
        return self.dims == other.dims and same(self.count, other.count)


def shard_rows(count: int | torch.SymInt, ranks: int) -> int | torch.SymInt:
    """Return the number of rows of a token shard, L = ceil(T / n)."""
    return (count + ranks - 1) // ranks


@contextlib.contextmanager
def any_number_of_tokens(graph: Graph) -> Iterator[None]:
    """Context in which questions about sizes hold for every number of tokens.

    Answers do not use the number of tokens that the graph was traced with (for example, whether a size is 1), and do
    not bind the graph to that number.
    """
    fake = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    env = None if fake is None else fake.shape_env
    unbound = contextlib.nullcontext() if env is None else env.suppress_guards()
    with enable_python_dispatcher(), unbound, symbols.patch(backed_size_oblivious=True):
        yield


def same(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every number of tokens that a graph accepts."""
    return statically_known_true(sym_eq(one, other))


def first_value(node: Node) -> Tensor | None:
    """Return the (first) tensor that a node returns, or None if it returns none."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((each for each in value if isinstance(each, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def row_bytes(node: Node, tokens: TokenDims) -> int | None:
    """Return the bytes of one token's row of a value, or None if they are not known at compile time."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    size = prod(value.shape[tokens.dims :]) * value.element_size()
    return size if isinstance(size, int) else None
