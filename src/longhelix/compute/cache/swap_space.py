"""Storage of a rank's swapped KV blocks: pinned host memory for a GPU's pool, a file for a pool in host memory."""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from longhelix.compute.cache.pool import KVPool
from longhelix.errors import UserError


class SwapSpace:
    """Slots of one KV block each. Contents start undefined. Raises UserError if there is no room for all slots.

    The file is an unnamed temporary file, which ends with the process.

    Attributes:
        swapped_blocks: Number of blocks swapped out or in so far.

    Args:
        num_slots: Slots of each KV group.
    """

    def __init__(self, pool: KVPool, num_slots: Sequence[int]) -> None:
        self._pool = pool
        self.swapped_blocks = 0
        block_bytes = [pool.block_bytes(group) for group in range(pool.num_groups)]
        sizes = [slots * size_of_block for slots, size_of_block in zip(num_slots, block_bytes, strict=True)]
        size = sum(sizes)
        try:
            bytes_X = _pinned(size) if pool.device.type == "cuda" else _mapped(size)
        except (OSError, RuntimeError) as error:
            place = "pinned memory" if pool.device.type == "cuda" else tempfile.gettempdir()
            raise UserError(
                f"swapped KV blocks need {size} bytes of {place} on a rank, which cannot be allocated: {error}; lower "
                "--swap-tokens" + ("" if pool.device.type == "cuda" else ", or set TMPDIR to a folder on a larger disk")
            ) from error
        self._slots = [
            part_X.view(slots, size_of_block)
            for part_X, slots, size_of_block in zip(bytes_X.split(sizes), num_slots, block_bytes, strict=True)
        ]

    def swap_out(self, block: int, slot: int, group: int = 0) -> None:
        """Copy a KV block to a slot."""
        self._slots[group][slot].copy_(self._pool.read([block], group))
        self.swapped_blocks += 1

    def swap_in(self, slot: int, block: int, group: int = 0) -> None:
        """Copy a slot to a KV block."""
        self._pool.write([block], self._slots[group][slot], group)
        self.swapped_blocks += 1


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _mapped(size: int) -> Tensor:
    """Map a file whose space is reserved, because the system kills a process that writes when the disk is full."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
