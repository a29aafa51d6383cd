"""Positions of tokens in prompts with images: one on each of three axes (M-RoPE)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longhelix.scheduler.request import ImageSpan


def positions(images: Sequence[ImageSpan], start: int, stop: int) -> NDArray[np.int64]:
    """positions_3T: time, row and column of the tokens from `start` to `stop`, int64. `images`: all of the prompt's, in
    order.

    Text counts up equally on all axes. All tokens of an image have the time of its first token, and rows and columns
    count up from there. The next token follows the largest of these (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    positions_3T = np.tile(np.arange(start, stop), (3, 1))
    for index, image in enumerate(images):
        if image.start >= stop:
            break
        own = slice(max(image.start - start, 0), max(image.stop - start, 0))
        place = np.arange(max(image.start, start), min(image.stop, stop)) - image.start
        row, column = np.divmod(place, image.columns)
        before = image.start + shift(images[:index])
        positions_3T[:, own] = before + np.stack([np.zeros_like(place), row, column])
        positions_3T[:, own.stop :] += image.shift
    return positions_3T


def shift(images: Sequence[ImageSpan]) -> int:
    """Return the shift of positions after all images, because an image has fewer positions than tokens."""
    return sum(image.shift for image in images)
