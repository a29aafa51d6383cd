"""The paged pool: this rank's bytes of all KV blocks, layer by layer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longhelix.kernels import KVFormat, KVLayer


class KVPool:
    """`layers` hold keys and values, one for each layer of the rank's stage; contents start undefined."""

    def __init__(self, format: KVFormat, num_layers: int, num_blocks: int, device: torch.device) -> None:
        self.format = format
        self.num_blocks = num_blocks
        self.device = device
        self.layers: list[KVLayer] = [format.new_layer(num_blocks, device) for _ in range(num_layers)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""
        return len(self.layers) * self.format.block_bytes

    def copy(self, source: int, target: int) -> None:
        """Make the KV block `target` equal to `source`, in all layers."""
        for layer in self.layers:
            for bytes_PX in layer.by_block:
                bytes_PX[target] = bytes_PX[source]

    def read(self, blocks: Sequence[int]) -> Tensor:
        """The bytes of KV blocks, of all layers, one block after the other: flat, uint8, on the pool's device. Ranks of
        one KVP group can write what another one of them has read."""
        bytes_BX = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=self.device)
        for block, bytes_X in zip(blocks, bytes_BX, strict=True):
            for own, given in self._parts(block, bytes_X):
                given.copy_(own)
        return bytes_BX.view(-1)

    def write(self, blocks: Sequence[int], bytes_X: Tensor) -> None:
        """Fill KV blocks with what `read` gave."""
        for block, block_X in zip(blocks, bytes_X.view(len(blocks), self.block_bytes), strict=True):
            for own, given in self._parts(block, block_X):
                own.copy_(given)

    def _parts(self, block: int, bytes_X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A KV block's tensors, in all layers, each beside its place in the block's bytes."""
        parts = [bytes_PX[block] for layer in self.layers for bytes_PX in layer.by_block]
        places = bytes_X.split([part.numel() for part in parts])
        return ((part, place.view(part.shape)) for part, place in zip(parts, places, strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(layer.values.nbytes + (0 if layer.scales is None else layer.scales.nbytes) for layer in self.layers)
