"""Count matches under the names that the pattern-based passes of vLLM and vllm-ascend use."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from longhelix.passes.norms import Norm, carried
from longhelix.passes.plan import ShardingPlan
from longhelix.passes.region import Reduced, Source
from longhelix.passes.rules import OwnRows, ShardOperand

aten = torch.ops.aten

CHUNK = "AllGatherChunkNoOp"
REDUCED = "FirstAllReduceRMSNorm", "MiddleAllReduceRMSNorm", "LastAllReduceRMSNorm", "Qwen3VLMiddleAllReduceRMSNorm"
GATHERED = (
    "MiddleLayerAllgatherAddRMSNorm",
    "LastLayerAllgatherRMSNorm",
    "Qwen3VLMiddleLayerAllgatherAddRMSNorm",
)
_NARROW = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8", torch.float8_e5m2: "FP8"}


def count_patterns(plan: ShardingPlan, how: str | None) -> Counter[str]:
    """Count matches by name.

    A match is a collective that is followed by a norm on a shard. If the value that is gathered after the norm is
    quantised, the name ends with StaticINT8, DynamicINT8, StaticFP8 or DynamicFP8.

    Args:
        how: Suffix of the name if the plan quantises the value. None means that the plan quantises no values.
    """
    found: Counter[str] = Counter()
    for source in plan.sources:
        norm = _first_norm(plan, source)
        if norm is not None:
            found[_name(plan, source, norm) + _suffix(plan, norm, how)] += 1
    if plan.chunks:
        found[CHUNK] = len(plan.chunks)
    return found


def _first_norm(plan: ShardingPlan, source: Source) -> Norm | None:
    """Return the nearest norm that is computed on shards from a collective's result."""
    by_node = {norm.node: norm for norm in plan.norms}
    return next((by_node[node] for node in _after(plan, source.node) if node in by_node), None)


def _after(plan: ShardingPlan, start: Node) -> Iterator[Node]:
    """Yield the nodes that are computed on shards from `start`, nearest first."""
    seen, pending = {start}, [start]
    while pending:
        node = pending.pop(0)
        yield node
        for user in plan.region.downstream(node):
            if user in plan.sharded and user not in seen:
                seen.add(user)
                pending.append(user)


def _name(plan: ShardingPlan, source: Source, norm: Norm) -> str:
    terms = len(_terms(plan, norm.normed, plan.normed - {norm.normed}))
    reused = norm.has_other_users()
    if isinstance(source, Reduced):
        first, middle, last, deepstack = REDUCED
        if terms == 1:
            return first
    else:
        middle, last, deepstack = GATHERED
    return deepstack if terms > 2 else middle if reused else last


def _terms(plan: ShardingPlan, total: Node, ends: set[Node]) -> list[Node]:
    """Return the terms of a sum: results of collectives, residuals and other inputs."""
    node = carried(total)
    if node.target is not aten.add.Tensor or node not in plan.region.calls or node in plan.region.sources:
        return [node]
    found: list[Node] = []
    for argument in plan.region.calls[node].arguments:
        if isinstance(argument, OwnRows):
            found.append(argument.node)
        elif isinstance(argument, ShardOperand):
            found += [argument.node] if carried(argument.node) in ends else _terms(plan, argument.node, ends)
    return found


def _suffix(plan: ShardingPlan, norm: Norm, how: str | None) -> str:
    gathered = [node for node in _after(plan, norm.node) if node in plan.gathered]
    values = [node.meta["val"] for node in gathered if isinstance(node.meta["val"], Tensor)]
    narrow = next((value for value in values if value.dtype in _NARROW), None)
    if narrow is None:
        return how if how and plan.quantised & set(gathered) else ""
    scales = [value for value in values if value.dtype not in _NARROW and value.shape[-1] < narrow.shape[-1]]
    return ("Dynamic" if scales else "Static") + _NARROW[narrow.dtype]
