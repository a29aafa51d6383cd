"""Block ids of several sequences as the ops take them: one behind the other, each with an extent."""

from collections.abc import Iterable

import torch
from torch import Tensor

BEFORE = 2  # ids that belong to no sequence, before those of each


def side_by_side(ids: Iterable[Tensor], other: int = 0) -> tuple[Tensor, Tensor]:
    """blocks_X and extents_B2; the last sequence's ids come first, and between sequences lies the id `other`."""
    pieces, extents, begin = [torch.empty(0, dtype=torch.int64)], [], 0
    for blocks_J in reversed(list(ids)):
        pieces += [torch.full((BEFORE,), other), blocks_J]
        begin += BEFORE
        extents.append((begin, begin + len(blocks_J)))
        begin += len(blocks_J)
    return torch.cat(pieces), torch.tensor(extents[::-1], dtype=torch.int64).view(-1, 2)
