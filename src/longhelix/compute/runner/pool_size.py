"""Computes the number of KV blocks of a rank's pool, from the options or from free memory."""

import bisect
import warnings
from collections.abc import Collection, Sequence

from longhelix.compute.models.parameters import stored_bytes
from longhelix.errors import UserError
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.kv.splits import most_state_bytes
from longhelix.spec import ModelSpec, number_format
from longhelix.spec.attention import Visibility
from longhelix.spec.layout import Layout

# Share of the memory left by the weights that the pool may use.
_POOL_SHARE = 0.8


def kv_bytes_per_token(
    spec: ModelSpec, layout: Layout, kv_dtype: str, device: str, rank: int, groups: Collection[int] | None = None
) -> int:
    """Return the bytes of one token's K and V on `rank`. groups: KV groups to count. None: all."""
    layers = [layer for layer in layout.layers(spec.num_layers, rank) if groups is None or spec.groups[layer] in groups]
    number = number_format(kv_dtype)
    return int(
        sum(
            len(layout.kv_heads(attention.heads, rank)) * attention.cache_entry.head_bytes(number, device)
            for attention in (spec.layers[layer].attention for layer in layers)
            if attention is not None
        )
    )


def split_state_bytes(spec: ModelSpec, layout: Layout, longest_tokens: int, rank: int) -> int:
    """Return the memory that a GPU's attention needs besides the pool, for sequences of up to `longest_tokens`."""
    return max(
        most_state_bytes(
            longest_tokens, len(layout.query_heads(attention.heads, rank)), attention.cache_entry.value_size
        )
        for attention in spec.attentions
    )


def affordable_blocks(
    spec: ModelSpec,
    layout: Layout,
    dtype: str,
    weight_dtype: str,
    kv_dtype: str,
    device: str,
    scheduler: SchedulerConfig,
    views: Sequence[Visibility],
    memory_bytes: int,
    ranks: Sequence[int],
    *,
    with_ends: bool = True,
) -> int:
    """Return how many KV blocks each of `ranks` can have in the memory that they share.

    The weights and the pools of layers with a window use the same memory.

    Args:
        views: Which tokens rows see, for each kind of layer with a window or chunks.
        with_ends: See `SchedulerConfig.windows_of`.
    """
    block_tokens = scheduler.block_tokens
    weight_bytes = sum(sum(stored_bytes(spec, layout, rank, dtype, weight_dtype).values()) for rank in ranks)
    full_group = [0] if views else None
    token_bytes = sum(kv_bytes_per_token(spec, layout, kv_dtype, device, rank, full_group) for rank in ranks)
    window_bytes = [
        sum(kv_bytes_per_token(spec, layout, kv_dtype, device, rank, [1 + view]) for rank in ranks)
        for view in range(len(views))
    ]
    free_bytes = int((memory_bytes - weight_bytes) * _POOL_SHARE)

    def exceeds(num_blocks: int) -> bool:
        windows = scheduler.windows_of(views, num_blocks, with_ends=with_ends)
        bytes_of_windows = sum(window.num_blocks * size for window, size in zip(windows, window_bytes, strict=True))
        return (num_blocks * token_bytes + bytes_of_windows) * block_tokens > free_bytes

    affordable_tokens = free_bytes // (token_bytes + sum(window_bytes))
    if views:
        # If no layer sees all tokens, blocks of the first KV group take no memory.
        listed_blocks = max(scheduler.most_listed_blocks, affordable_tokens // block_tokens)
        most_blocks = free_bytes // (block_tokens * token_bytes) if token_bytes else listed_blocks
        blocks = bisect.bisect_left(range(1, max(most_blocks, 0) + 1), True, key=exceeds)
        affordable_tokens = max(affordable_tokens, blocks * block_tokens)
    if affordable_tokens < 1:
        raise UserError(
            f"the weights take {weight_bytes} bytes, which leaves no memory for a KV cache: free some memory, or use a "
            "smaller model or dtype",
            "out_of_memory",
        )
    if affordable_tokens < block_tokens:
        raise UserError(
            f"the memory left by the weights holds {affordable_tokens} tokens of KV cache, less than one block of "
            f"{block_tokens}: set --block-tokens to at most {affordable_tokens}, or free some memory",
            "out_of_memory",
        )
    return affordable_tokens // block_tokens


def num_blocks(asked_tokens: int | None, longest_tokens: int, affordable: int, block_tokens: int, kvp: int) -> int:
    """Return the KV blocks of each KVP rank.

    Args:
        asked_tokens: Requested capacity. None: room for one request of `longest_tokens`, if memory allows.
    """
    affordable_tokens = affordable * block_tokens * kvp
    if asked_tokens is None:
        longest_blocks = -(-longest_tokens // block_tokens)
        if longest_blocks > affordable:
            warnings.warn(
                f"memory holds {affordable_tokens} tokens of KV cache, less than one request of max_model_len",
                stacklevel=3,
            )
        return min(longest_blocks, affordable)
    if asked_tokens > affordable_tokens:
        raise UserError(
            f"kv_cache_tokens is {asked_tokens}, but the memory left by the weights holds {affordable_tokens}: set "
            f"--kv-cache-tokens to at most {affordable_tokens}",
            "out_of_memory",
        )
    return -(-asked_tokens // (block_tokens * kvp))


def num_blocks_of_many(tokens: int, affordable: int, block_tokens: int, kvp: int, *, shares_memory: bool) -> int:
    """Return the KV blocks of each KVP rank for `tokens` of many requests, as far as memory allows.

    Args:
        shares_memory: Leave half of the free memory to other programs.
    """
    most_blocks = max(affordable // 2, 1) if shares_memory else affordable
    return min(-(-tokens // (block_tokens * kvp)), most_blocks)
