"""Creates the engine configuration of a measurement."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longhelix.compute.machine import host
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.hub.download import find
from longhelix.engine.options import EngineOptions
from longhelix.engine.places import Places
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec.layout import Layout
from longhelix.values import whole

# With these settings, every repetition runs the same steps.
_SAME_STEPS = {"chunk_tokens": 512, "prefix_cache": False}


def configure(
    model: str,
    layout: Layout,
    lengths: Sequence[int],
    *,
    threads: int | None = None,
    places: Places | None = None,
    **settings: Any,
) -> EngineConfig:
    """Create an engine configuration that has room for one request of the longest of `lengths`.

    Args:
        model: path of a model, hub ID, or `builtin`.
        layout: layout of the ranks.
        lengths: contexts or prompts to measure, in tokens.
        threads: threads per rank. None divides the cores of each host evenly among its ranks.
        places: the hosts of the ranks. None for this host.
        settings: fields of `EngineOptions`.

    Raises:
        UserError: a value is out of range, or the KV cache does not fit in memory.
    """
    check_positive("a context or prompt", *lengths)
    longest = max(lengths)
    settings = _SAME_STEPS | settings
    whole("chunk_tokens", settings["chunk_tokens"], 1, MOST_TOKENS)
    with warnings.catch_warnings():
        # Measurements do not use the answers. The check below rejects lengths whose KV does not fit in memory.
        warnings.filterwarnings("ignore", message="max_model_len .* exceeds the|memory holds")
        options = EngineOptions(max_model_len=longest, device="cpu", **settings)
        config = resolve(open_checkpoint(find(model)), layout, options, places)
    held_tokens = config.scheduler.num_blocks * config.scheduler.block_tokens * layout.kvp
    if held_tokens < longest:
        raise UserError(
            f"{longest} tokens of {config.formats.kv_dtype} KV do not fit in memory: use at most {held_tokens} tokens, "
            "or a smaller --kv-dtype if the command has this option",
            "out_of_memory",
        )
    if threads is None:
        return config
    check_threads(threads)
    machines = config.machines
    return replace(config, machines=replace(machines, threads_per_rank=(threads,) * len(machines.hosts.ranks)))


def check_threads(*numbers: int) -> None:
    """Raise UserError if the number of threads is below 1 or above the number of cores."""
    for threads in numbers:
        whole("threads", value=threads, least=1, most=host.cores(), note=", the number of cores of this machine")


def check_positive(name: str, *values: int) -> None:
    """Raise UserError if there are no values, or if a value is below 1."""
    if not values or min(values) < 1:
        raise UserError(f"{name} is {min(values) if values else 'empty'}: set it to 1 or more")
