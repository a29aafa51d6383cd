"""Finds the tokens of a sequence whose KV is on this rank, and which of them a row sees."""

import numpy as np
from numpy.typing import NDArray

from longhelix.spec.attention import Visibility


def first_seen(view: Visibility, positions_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first position that each row sees in a layer with a limit. positions_T: positions of the rows."""
    if view.window_tokens is not None:
        return np.maximum(positions_T + 1 - view.window_tokens, 0)
    assert view.chunk_tokens is not None
    return positions_T // view.chunk_tokens * view.chunk_tokens


def first_local(places: NDArray[np.int64], positions_T: NDArray[np.int64], block_tokens: int) -> NDArray[np.int64]:
    """Count the tokens before each position that lie in the local blocks, which are at `places`."""
    block_T, offset_T = np.divmod(positions_T, block_tokens)
    before_T, is_here_T = find_blocks(places, block_T)
    return before_T * block_tokens + np.where(is_here_T, offset_T, 0)


def find_blocks(places: NDArray[np.int64], block_T: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Count the local blocks, at `places`, before each block of `block_T`. Also returns whether that block is local."""
    if not len(places):
        return np.zeros_like(block_T), np.zeros(len(block_T), np.bool_)
    before_T = places.searchsorted(block_T)
    return before_T, places.take(before_T, mode="clip") == block_T  # beyond the last place, the block is a later one
