"""Compute the number of KV blocks in the pool of a KVP rank on the simulated system."""

from longhelix.errors import UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes, memory, token_bytes
from longhelix.perf.setting import Setting
from longhelix.spec.layout import Layout


def num_blocks(
    setting: Setting, layout: Layout, *, block_tokens: int, rows: int, requests: int, asked_tokens: int | None = None
) -> int:
    """Return the number of KV blocks in the pool of each KVP rank.

    Args:
        block_tokens: tokens per block.
        rows: number of rows in the largest step.
        requests: number of requests with linear attention states.
        asked_tokens: capacity in tokens over all KVP ranks. With None, the pool uses all memory that the weights, the
            states and one step leave free on the fullest rank, as in `longhelix estimate`.

    Raises:
        UserError: the weights leave no memory for a single block, or `asked_tokens` tokens do not fit.
    """
    layouts = Layouts.of([layout])
    held = memory(setting, layouts=layouts, batch=0.0, context=0.0, chunk=float(rows)).total_bytes
    held = held + kv_bytes(setting, layouts, float(requests), 0.0)
    free_bytes = float((setting.capacity_bytes(layouts) - held)[0])
    # A request with one token per KVP rank stores one token on each rank.
    one_bytes = float(token_bytes(setting, layouts, 1.0, float(layout.kvp))[0])
    affordable = int(free_bytes / one_bytes) // block_tokens
    if affordable < 1:
        raise UserError(
            f"the weights and one step need all {float(setting.capacity_bytes(layouts)[0]) / 1e9:.1f} GB of a GPU, "
            "which leaves no memory for KV: use more GPUs or a smaller dtype",
            "out_of_memory",
        )
    if asked_tokens is None:
        return affordable
    most_tokens = affordable * block_tokens * layout.kvp
    if asked_tokens > most_tokens:
        raise UserError(
            f"kv_cache_tokens is {asked_tokens}, but there is memory for only {most_tokens} tokens: set "
            f"--kv-cache-tokens to at most {most_tokens}",
            "out_of_memory",
        )
    return -(-asked_tokens // (block_tokens * layout.kvp))
