"""Which steps are sequence-parallel: the defaults, in vLLM's order."""

import warnings
from collections.abc import Iterable
from typing import Any

from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec import ModelSpec
from longhelix.spec.layout import Layout

_DENSE_TOKENS, _EXPERT_TOKENS = 1000, 1  # the fewest of a step, where nobody says it


def token_ranges(spec: ModelSpec, layout: Layout, options: EngineOptions, compile: bool) -> TokenRanges:
    """From `enable_sp`, `sp_min_token_num` and `compilation_config`. Raises UserError for what contradicts itself.

    Asked for without a number of tokens, sequence parallelism begins at the model's default. A number alone turns it on
    for dense models. Without either it is off.
    """
    config = options.compilation_config or {}
    enabled = _one("enable_sp", options.enable_sp, config)
    min_tokens = _one("sp_min_token_num", options.sp_min_token_num, config)
    splits = config.get("compile_ranges_split_points", ())
    if splits and not compile:
        raise UserError(
            f"compile_ranges_split_points are of compiled layers, but execution is {options.execution}: set it to "
            "compiled, or leave them out"
        )
    if options.flash_comm_v1:
        if enabled:
            raise UserError("flash_comm_v1 keeps token shards without a compiler pass: leave enable_sp out, or it")
        return _with(splits, spec, layout, options, min_tokens)
    if enabled is None:
        enabled = min_tokens is not None
        if enabled and spec.moe is not None:
            raise UserError("sp_min_token_num alone does nothing for models with experts: set enable_sp as well")
    if not enabled:
        return TokenRanges(tuple(splits))
    if not compile:
        raise UserError(
            f"sequence parallelism is a pass over compiled layers, but execution is {options.execution}: set it to "
            "compiled, or leave enable_sp and sp_min_token_num out"
        )
    return _with(splits, spec, layout, options, min_tokens)


def _with(
    splits: Iterable[int], spec: ModelSpec, layout: Layout, options: EngineOptions, min_tokens: int | None
) -> TokenRanges:
    if options.batch_invariant:
        raise UserError(
            "batch_invariant is not kept by sequence parallelism, where norms of large steps are ops of their own: "
            "leave one of them out"
        )
    if layout.ffn_ranks == 1:
        warnings.warn("sequence parallelism is off: a rank has the whole FFN, and no one to share with", stacklevel=5)
        return TokenRanges(tuple(splits))
    if min_tokens is None:
        min_tokens = _DENSE_TOKENS if spec.moe is None else _EXPERT_TOKENS
    return TokenRanges(tuple(sorted({*splits, min_tokens})), min_tokens, options.flash_comm_v1)


def _one(name: str, option: Any, config: dict[str, Any]) -> Any:
    """What an option and the compilation config say of the same."""
    given = config.get(name)
    if option is not None and given is not None and option != given:
        raise UserError(f"{name} is {option}, but {given} in compilation_config: leave one of them out")
    return option if given is None else given
