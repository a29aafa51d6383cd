"""The configuration of the engine that a measurement runs with."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longhelix.compute.machine import host
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec.layout import Layout
from longhelix.values import whole

# Every repetition computes the same steps.
_SAME_STEPS = {"chunk_tokens": 512, "prefix_cache": False}


def configure(
    model: str,
    layout: Layout,
    lengths: Sequence[int],
    *,
    threads: int | None = None,
    **settings: Any,
) -> EngineConfig:
    """The engine's configuration, with `settings` of `EngineOptions`, for one request as long as the longest of
    `lengths`. Raises UserError."""
    check_positive("a context or prompt", *lengths)
    longest = max(lengths)
    settings = _SAME_STEPS | settings
    whole("chunk_tokens", settings["chunk_tokens"], 1, MOST_TOKENS)
    with warnings.catch_warnings():
        # Nobody reads the answers, and a KV that does not fit is refused below.
        warnings.filterwarnings("ignore", message="max_model_len .* goes beyond|memory holds")
        options = EngineOptions(max_model_len=longest, device="cpu", **settings)
        config = resolve(open_checkpoint(model), layout, options)
    held_tokens = config.scheduler.num_blocks * config.scheduler.block_tokens * layout.kvp
    if held_tokens < longest:
        raise UserError(
            f"{longest} tokens of {config.kv_dtype} KV do not fit in memory: give at most {held_tokens} tokens, or, "
            "where it can be set, a smaller --kv-dtype",
            "out_of_memory",
        )
    if threads is None:
        return config
    check_threads(threads)
    return replace(config, threads_per_rank=threads)


def check_threads(*numbers: int) -> None:
    """Refuse more threads of one process than there are cores."""
    for threads in numbers:
        whole("threads", threads, 1, host.cores(), ", the cores of this machine")


def check_positive(name: str, *values: int) -> None:
    """Refuse numbers below 1, and none at all."""
    if not values or min(values) < 1:
        raise UserError(f"{name} is {min(values) if values else 'empty'}: give 1 or more")
