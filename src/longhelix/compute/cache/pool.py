"""The paged KV pool of one rank."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from longhelix.compute.kernels import TILES, KVFormat, KVLayer


class KVPool:
    """The memory of all KV blocks of a rank. Contents start undefined.

    A KV block has one id in all entries and layers of a KV group.

    Attributes:
        layers: `layers[i][name]` is the cache entry `name` of the i-th layer of the rank's stage.

    Args:
        formats: Formats of each layer's entries, by name. All have the same number of tokens per KV block.
        num_blocks: KV blocks of the first group.
        groups: KV group of each layer. Empty: all layers are in the first group.
        window_blocks: KV blocks of each other group.
    """

    def __init__(
        self,
        formats: Sequence[Mapping[str, KVFormat]],
        num_blocks: int,
        device: torch.device,
        groups: Sequence[int] = (),
        window_blocks: Sequence[int] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.device = device
        self._groups = groups or (0,) * len(formats)
        self._blocks = num_blocks, *window_blocks
        self.layers: list[dict[str, KVLayer]] = [
            {name: format.new_layer(self._blocks[group], device) for name, format in of_layer.items()}
            for of_layer, group in zip(formats, self._groups, strict=True)
        ]

    @property
    def num_groups(self) -> int:
        return len(self._blocks)

    @cached_property
    def formats(self) -> tuple[KVFormat, ...]:
        """The distinct formats of all entries."""
        return tuple(dict.fromkeys(entry.format for entry in self.entries()))

    @property
    def block_tokens(self) -> int:
        (block_tokens,) = {format.block_tokens for format in self.formats}
        return block_tokens

    def entries(self) -> Iterator[KVLayer]:
        """Return the entries of all layers."""
        return (entry for layer in self.layers for entry in layer.values())

    def _entries_of(self, group: int) -> Iterator[KVLayer]:
        layers = (layer for layer, of_layer in zip(self.layers, self._groups, strict=True) if of_layer == group)
        return (entry for layer in layers for entry in layer.values())

    @property
    def packed(self) -> bool:
        """Whether the native CPU kernels can read all entries."""
        return all(format.arrangement is TILES for format in self.formats)

    def block_bytes(self, group: int = 0) -> int:
        """Return the bytes of one KV block in all layers of a group."""
        return sum(entry.format.block_bytes for entry in self._entries_of(group))

    def copy(self, source: int, target: int, group: int = 0) -> None:
        """Make the KV block `target` equal to `source`, in all layers of a group."""
        for entry in self._entries_of(group):
            for bytes_PX in entry.by_block:
                bytes_PX[target] = bytes_PX[source]

    def read(self, blocks: Sequence[int], group: int = 0) -> Tensor:
        """Return the bytes of KV blocks in all layers of a group, one block after the other.

        Other ranks of the KVP group can `write` them.

        Returns:
            bytes_X, flat, on the pool's device. uint8.
        """
        bytes_JX = torch.empty(len(blocks), self.block_bytes(group), dtype=torch.uint8, device=self.device)
        for block, bytes_X in zip(blocks, bytes_JX, strict=True):
            for entry_X, piece_X in self._pieces(block, group, bytes_X):
                piece_X.copy_(entry_X)
        return bytes_JX.view(-1)

    def write(self, blocks: Sequence[int], bytes_X: Tensor, group: int = 0) -> None:
        """Fill KV blocks with the bytes that `read` returned."""
        for block, block_X in zip(blocks, bytes_X.view(len(blocks), self.block_bytes(group)), strict=True):
            for entry_X, piece_X in self._pieces(block, group, block_X):
                entry_X.copy_(piece_X)

    def _pieces(self, block: int, group: int, bytes_X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors of a KV block in all layers of a group, each with its part of the block's bytes."""
        entries_X = [bytes_PX[block] for entry in self._entries_of(group) for bytes_PX in entry.by_block]
        places = bytes_X.split([entry_X.numel() for entry_X in entries_X])
        return ((entry_X, place.view(entry_X.shape)) for entry_X, place in zip(entries_X, places, strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.entries() for tensor in entry.tensors)
