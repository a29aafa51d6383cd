"""Decides which steps are sequence-parallel, with vLLM's rules for defaults."""

import warnings
from collections.abc import Iterable
from typing import Any

from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec import ModelSpec
from longhelix.spec.layout import Layout

_DENSE_TOKENS, _EXPERT_TOKENS = 1000, 1  # default minimum tokens per step, for dense models and for models with experts


def token_ranges(spec: ModelSpec, layout: Layout, options: EngineOptions, compile: bool) -> TokenRanges:
    """Return the token ranges that follow from `enable_sp`, `sp_min_token_num`, `compilation_config` and the layout.

    If only `enable_sp` is set, sequence parallelism begins at the model's default number of tokens. If only
    `sp_min_token_num` is set, sequence parallelism is on for dense models. `flash_comm_v1` also turns it on. If none of
    these settings is given, sequence parallelism is off.

    Raises:
        UserError: the settings contradict each other.
    """
    config = options.compilation_config or {}
    enabled = _one("enable_sp", options.enable_sp, config)
    min_tokens = _one("sp_min_token_num", options.sp_min_token_num, config)
    splits = config.get("compile_ranges_split_points", ())
    if splits and not compile:
        raise UserError(
            f"compile_ranges_split_points needs compiled layers, but execution is {options.execution}: set execution "
            "to compiled, or leave compile_ranges_split_points out"
        )
    if options.flash_comm_v1:
        if enabled:
            raise UserError(
                "flash_comm_v1 and enable_sp are two ways to get sequence parallelism: leave one of them out"
            )
        return _with(splits, spec=spec, layout=layout, options=options, min_tokens=min_tokens)
    if enabled is None:
        enabled = min_tokens is not None
        if enabled and spec.moes:
            raise UserError("sp_min_token_num alone does nothing for models with experts: set enable_sp too")
    if not enabled:
        return TokenRanges(tuple(splits))
    if not compile:
        raise UserError(
            f"sequence parallelism needs compiled layers, but execution is {options.execution}: set execution to "
            "compiled, or leave enable_sp and sp_min_token_num out"
        )
    return _with(splits, spec=spec, layout=layout, options=options, min_tokens=min_tokens)


def _with(
    splits: Iterable[int], spec: ModelSpec, layout: Layout, options: EngineOptions, min_tokens: int | None
) -> TokenRanges:
    if options.batch_invariant:
        raise UserError(
            "batch_invariant does not work with sequence parallelism, which computes the norms of large steps with "
            "other ops: leave one of them out"
        )
    if layout.ffn_ranks == 1:
        warnings.warn(
            "sequence parallelism is off because each rank has the whole FFN: choose a layout that shards the FFN, "
            "or leave sequence parallelism out",
            stacklevel=5,
        )
        return TokenRanges(tuple(splits))
    if min_tokens is None:
        min_tokens = _EXPERT_TOKENS if spec.moes else _DENSE_TOKENS
    return TokenRanges(tuple(sorted({*splits, min_tokens})), min_tokens, options.flash_comm_v1)


def _one(name: str, option: Any, config: dict[str, Any]) -> Any:
    """Return the value of an option that may also be given in `compilation_config`."""
    given = config.get(name)
    if option is not None and given is not None and option != given:
        raise UserError(f"{name} is {option}, but compilation_config sets it to {given}: leave one of them out")
    return option if given is None else given
