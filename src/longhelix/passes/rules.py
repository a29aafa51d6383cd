"""Sharding rules: which ops are token-wise, and how to call each of these ops on a token shard.

An op is token-wise if row i of its results depends only on row i of its operands. These rules do not treat matrix
products as token-wise, because each rank may hold a different shard of the weights.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from longhelix.passes.tokens import TokenDims, first_value, same

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class ShardOperand:
    """An operand of a `ShardedCall`: the token shard of a node."""

    node: Node


@dataclass(frozen=True)
class OwnRows:
    """An operand of a `ShardedCall`: this rank's rows of a node that all ranks have in full."""

    node: Node
    tokens: TokenDims


@dataclass(frozen=True)
class Squeezed:
    """An operand of a `ShardedCall`: a node without leading dims of size 1, so that it has `dims` dims."""

    node: Node
    dims: int


@dataclass(frozen=True)
class ShardRows:
    """A size in a `ShardedCall` that is replaced with L, the number of rows of a token shard."""


@dataclass(frozen=True)
class ShardedCall:
    """How to call an op on token shards."""

    dims: int  # number of leading dims of the op's full result that hold tokens
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments


class NotTokenWiseError(Exception):
    """Raised if an op cannot run on a token shard. The message says why."""


@dataclass(frozen=True)
class Rules:
    """The rules for torch's ops and for custom ops."""

    # Custom token-wise ops -> names of the operands that hold tokens in their first dim. The other operands must be the
    # same on every rank. All results hold tokens in their first dim.
    rows: Mapping[OpOverload, Sequence[str]]

    def call(self, node: Node, tokens: Mapping[Node, TokenDims], varying: Callable[[Node], bool]) -> ShardedCall:
        """Return how to call the op of `node` on token shards.

        Args:
            tokens: The nodes that have token shards.
            varying: Returns whether a node may have different values on different ranks.

        Raises:
            NotTokenWiseError: The op cannot run on a token shard.
        """
        target = node.target
        if target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            return ShardedCall(tokens[source].dims, (ShardOperand(source), node.args[1]))
        if not isinstance(target, OpOverload):
            raise NotTokenWiseError(f"{node.name} is not an op of torch")
        mixed = [arg for arg in node.all_input_nodes if arg not in tokens and varying(arg)]
        if mixed:
            raise NotTokenWiseError(f"{target} also uses {mixed[0].name}, which may differ between ranks")
        if target in self.rows:
            return _declared(node, tokens, self.rows[target])
        if target in _DIM_RULES:
            return _DIM_RULES[target](node, tokens)
        if target in _SELECTING:
            raise NotTokenWiseError(f"{target} selects some of a token's channels, which may differ between ranks")
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise NotTokenWiseError(f"{target} draws random numbers")
        if target in _POINTWISE or torch.Tag.pointwise in target.tags:
            return _pointwise(node, tokens)
        raise NotTokenWiseError(f"{target} is not known to be token-wise")

    def same_everywhere(self, node: Node) -> bool:
        """True if an op returns the same value on all ranks if its operands are the same on all ranks.

        This is False for matrix products, because ranks may hold different weights. It is also False for ops that
        select a part of a value, because each rank may select its own part.
        """
        target = node.target
        if target is operator.getitem:
            return True
        if not isinstance(target, OpOverload):  # arithmetic on sizes
            return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
        if target in self.rows or target in _DIM_RULES or target in _POINTWISE or target in _SAME_EVERYWHERE:
            return True
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace in ("aten", "prims") and torch.Tag.pointwise in target.tags and not drawn


def _arguments(node: Node) -> dict[str, Any]:
    """Return a node's arguments by their names in the op's schema, including defaults."""
    assert isinstance(node.target, OpOverload)
    given = dict(node.kwargs)
    found: dict[str, Any] = {}
    for index, parameter in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            found[parameter.name] = node.args[index]
        elif parameter.name in given:
            found[parameter.name] = given[parameter.name]
        else:
            found[parameter.name] = parameter.default_value
    return found


def _operand(argument: Any, dims: int, result: Tensor, tokens: Mapping[Node, TokenDims]) -> Any:
    """Return the replacement for an operand that is broadcast to `result`, with tokens in the first `dims` dims."""
    value = first_value(argument) if isinstance(argument, Node) else None
    if value is None:
        return argument
    assert isinstance(argument, Node)
    after = result.dim() - dims
    if argument in tokens:
        aligned = value.dim() == result.dim() and tokens[argument].dims == dims
        if not aligned or not _same_leading(value, result, dims):
            raise NotTokenWiseError(f"{argument.name} holds its tokens in other dims than the result")
        return ShardOperand(argument)
    if value.dim() <= after:
        return argument
    if value.dim() == result.dim() and _same_leading(value, result, dims):
        return OwnRows(argument, TokenDims.of(value, dims))
    leading = value.shape[: value.dim() - after]
    if all(same(size, 1) for size in leading):
        # Keep at least one dim, because type promotion in torch treats tensors without dims differently.
        return Squeezed(argument, max(after, 1))
    raise NotTokenWiseError(f"{argument.name} is repeated over some of the tokens")


def _same_leading(value: Tensor, result: Tensor, dims: int) -> bool:
    return all(same(a, b) for a, b in zip(value.shape[:dims], result.shape[:dims], strict=True))


def _mapped(argument: Any, dims: int, result: Tensor, tokens: Mapping[Node, TokenDims]) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_mapped(each, dims, result, tokens) for each in argument)
    return _operand(argument, dims, result, tokens)


def _only(node: Node, tokens: Mapping[Node, TokenDims]) -> Node:
    """Return the first operand, which must be the only operand that holds tokens."""
    sharded = [arg for arg in node.all_input_nodes if arg in tokens]
    if len(sharded) != 1 or node.args[0] is not sharded[0]:
        raise NotTokenWiseError(f"{node.target} has several operands that hold tokens")
    return sharded[0]


def _pointwise(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    result = first_value(node)
    assert result is not None
    dims = max(tokens[arg].dims for arg in node.all_input_nodes if arg in tokens)
    arguments = _mapped(tuple(node.args), dims, result, tokens)
    named = {name: _mapped(value, dims, result, tokens) for name, value in node.kwargs.items()}
    return ShardedCall(dims, arguments, named)


def _from_end(dim: int, ndim: int, tokens: TokenDims, target: object) -> int:
    """Return the index of a dim counted from the end, which is the same for a value and for its shard."""
    dim = dim if dim >= 0 else dim + ndim
    if dim < tokens.dims:
        raise NotTokenWiseError(f"{target} works across tokens")
    return dim - ndim


def _along(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    """Rule for ops with an argument `dim` (one dim or several) whose operands all hold tokens in the same dims."""
    source = next(arg for arg in node.all_input_nodes if arg in tokens)
    value, found = first_value(source), _arguments(node)
    assert value is not None
    dim = found["dim"]
    if dim is None or dim == []:
        raise NotTokenWiseError(f"{node.target} works across tokens")
    held = tokens[source]
    if isinstance(dim, (list, tuple)):
        found["dim"] = [_from_end(each, value.dim(), held, node.target) for each in dim]
    else:
        found["dim"] = _from_end(dim, value.dim(), held, node.target)
    return _bound(node, found=found, held=held, like=value, tokens=tokens)


def _bound(
    node: Node, found: dict[str, Any], held: TokenDims, like: Tensor, tokens: Mapping[Node, TokenDims]
) -> ShardedCall:
    """Return a call with the arguments `found`. Tensor arguments get the sizes of `like` in the token dims."""
    assert isinstance(node.target, OpOverload)
    arguments, named = [], {}
    for parameter in node.target._schema.arguments:
        value = _unbroadcast(found[parameter.name], held, like, tokens)
        if parameter.kwarg_only:
            named[parameter.name] = value
        else:
            arguments.append(value)
    return ShardedCall(held.dims, tuple(arguments), named)


def _unbroadcast(argument: Any, held: TokenDims, like: Tensor, tokens: Mapping[Node, TokenDims]) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_unbroadcast(each, held, like, tokens) for each in argument]
    value = first_value(argument) if isinstance(argument, Node) else None
    if value is None:
        return argument
    if argument in tokens:
        if not tokens[argument].matches(held):
            raise NotTokenWiseError(f"{argument.name} holds its tokens in other dims")
        return ShardOperand(argument)
    if value.dim() < held.dims or not _same_leading(value, like, held.dims):
        raise NotTokenWiseError(f"{argument.name} holds no tokens")
    return OwnRows(argument, TokenDims.of(value, held.dims))


def _unsqueeze(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    source, result = _only(node, tokens), first_value(node)
    assert result is not None
    dim = _from_end(node.args[1], result.dim(), tokens[source], node.target)  # type: ignore[arg-type]
    return ShardedCall(tokens[source].dims, (ShardOperand(source), dim))


def _resized(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    """Rule for views. The leading dims of the result must hold exactly the tokens, as in the operand."""
    source, result = _only(node, tokens), first_value(node)
    assert result is not None
    held = tokens[source]
    for dims in range(1, result.dim() + 1):
        if same(prod(result.shape[:dims]), held.count):
            return ShardedCall(dims, (ShardOperand(source), [ShardRows(), *_known(node, result.shape[dims:])]))
    raise NotTokenWiseError(f"{node.target} mixes tokens with channels")


def _expanded(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    source, result = _only(node, tokens), first_value(node)
    value, held = first_value(source), tokens[source]
    assert result is not None
    assert value is not None
    if result.dim() != value.dim() or not _same_leading(value, result, held.dims):
        raise NotTokenWiseError(f"{node.target} repeats tokens")
    return ShardedCall(held.dims, (ShardOperand(source), [ShardRows(), *_known(node, result.shape[held.dims :])]))


def _known(node: Node, sizes: Sequence[int | torch.SymInt]) -> list[int]:
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        raise NotTokenWiseError(f"{node.target} returns rows of a size that is not known at compile time")
    return known


def _permuted(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    source = _only(node, tokens)
    value, held = first_value(source), tokens[source]
    assert value is not None
    order = [dim % value.dim() for dim in node.args[1]]  # type: ignore[union-attr,operator]
    if order[: held.dims] != list(range(held.dims)):
        raise NotTokenWiseError(f"{node.target} moves tokens")
    return ShardedCall(held.dims, (ShardOperand(source), [0, *(dim - held.dims + 1 for dim in order[held.dims :])]))


def _fused_norm(node: Node, tokens: Mapping[Node, TokenDims]) -> ShardedCall:
    source, result = _only(node, tokens), first_value(node)
    assert result is not None
    held = tokens[source]
    if len(node.args[1]) > result.dim() - held.dims:  # type: ignore[arg-type]
        raise NotTokenWiseError(f"{node.target} works across tokens")
    return ShardedCall(held.dims, (ShardOperand(source), *node.args[1:]), node.kwargs)


def _declared(node: Node, tokens: Mapping[Node, TokenDims], rows: Sequence[str]) -> ShardedCall:
    found = _arguments(node)
    source = next(arg for arg in node.all_input_nodes if arg in tokens)
    value, held = first_value(source), tokens[source]
    assert value is not None
    assert isinstance(node.target, OpOverload)
    if held.dims != 1:
        raise NotTokenWiseError(f"{node.target} takes tokens in one dim, not in {held.dims}")
    arguments, named = [], {}
    for parameter in node.target._schema.arguments:
        argument = found[parameter.name]
        if parameter.name in rows:
            argument = _unbroadcast(argument, held, value, tokens)
        elif isinstance(argument, Node) and argument in tokens:
            raise NotTokenWiseError(f"{node.target} needs all tokens of {parameter.name}")
        if parameter.kwarg_only:
            named[parameter.name] = argument
        else:
            arguments.append(argument)
    return ShardedCall(1, tuple(arguments), named)


_SELECTING = {
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}

_POINTWISE = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}

_SAME_EVERYWHERE = {
    aten.constant_pad_nd.default,
    # If each rank has a shard of the vocabulary, the rows differ, but they are summed before any other op uses them.
    aten.embedding.default,
    aten.full.default,
    aten.lift_fresh_copy.default,
    aten.scalar_tensor.default,
    aten.sym_size.int,
    prims.iota.default,
}

_DIM_RULES: Mapping[object, Callable[[Node, Mapping[Node, TokenDims]], ShardedCall]] = {
    **dict.fromkeys(
        (
            aten._log_softmax.default,
            aten._softmax.default,
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.cumsum.default,
            aten.gather.default,
            aten.linalg_vector_norm.default,
            aten.logsumexp.default,
            aten.max.dim,
            aten.mean.dim,
            aten.min.dim,
            aten.prod.dim_int,
            aten.sort.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.sum.dim_IntList,
            aten.topk.default,
            aten.cat.default,
        ),
        _along,
    ),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _resized),
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten._fused_rms_norm.default: _fused_norm,
}
