"""Compute the sizes of the pools of KV blocks on the simulated system."""

import bisect

from longhelix.errors import UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, layer_bytes, memory
from longhelix.perf.setting import Setting
from longhelix.scheduler.config import SchedulerConfig
from longhelix.spec.layout import Layout


def with_pools(
    setting: Setting, layout: Layout, config: SchedulerConfig, *, asked_tokens: int | None = None
) -> SchedulerConfig:
    """Return the settings of a scheduler with the pools of each KVP rank.

    Args:
        config: the settings, except for the pools.
        asked_tokens: capacity in tokens over all KVP ranks. With None, the pool uses all memory that the weights, the
            states and one step leave free on the fullest rank, as in `longhelix estimate`.

    Raises:
        UserError: the weights leave no memory for a single block, or `asked_tokens` tokens do not fit.
    """
    layouts, block_tokens, views = Layouts.of([layout]), config.block_tokens, setting.model.views
    rows = config.steps.max_running + config.steps.chunk_tokens
    held = memory(setting, layouts=layouts, batch=0.0, context=0.0, chunk=float(rows)).total_bytes
    held = held + kv_bytes(setting, layouts, float(config.steps.max_running), 0.0)
    free_bytes = float((setting.capacity_bytes(layouts) - held)[0])
    full_bytes, *window_bytes = (block_tokens * float(each[0]) for each in layer_bytes(setting, layouts))

    def exceeds(num_blocks: int) -> bool:
        windows = config.windows_of(views, num_blocks)
        more = sum(window.num_blocks * size for window, size in zip(windows, window_bytes, strict=True))
        return num_blocks * full_bytes + more > free_bytes

    # Without layers that see everything, their blocks take no memory.
    many = max(config.most_listed_blocks, int(free_bytes / (full_bytes + sum(window_bytes))))
    most = int(free_bytes / full_bytes) if full_bytes else many
    affordable = bisect.bisect_left(range(1, max(most, 0) + 1), True, key=exceeds)
    if affordable < 1:
        raise UserError(
            f"the weights and one step need all {float(setting.capacity_bytes(layouts)[0]) / 1e9:.1f} GB of a GPU, "
            "which leaves no memory for KV: use more GPUs or a smaller dtype",
            "out_of_memory",
        )
    if asked_tokens is None:
        return config.with_pools(affordable, config.windows_of(views, affordable))
    most_tokens = affordable * block_tokens * layout.kvp
    if asked_tokens > most_tokens:
        raise UserError(
            f"kv_cache_tokens is {asked_tokens}, but there is memory for only {most_tokens} tokens: set "
            f"--kv-cache-tokens to at most {most_tokens}",
            "out_of_memory",
        )
    asked = -(-asked_tokens // (block_tokens * layout.kvp))
    return config.with_pools(asked, config.windows_of(views, asked))
