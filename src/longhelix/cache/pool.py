"""The paged pool: this rank's bytes of all KV blocks, layer by layer."""

from collections.abc import Iterator, Mapping

import torch

from longhelix.kernels import TILES, KVFormat, KVLayer


class KVPool:
    """`layers[i][name]` holds what layer i keeps in the cache entry of that name; contents start undefined.

    `formats`: of each entry of a layer, by name, all with KV blocks of as many tokens; a KV block has one id in all
    entries and layers.
    """

    def __init__(self, formats: Mapping[str, KVFormat], num_layers: int, num_blocks: int, device: torch.device) -> None:
        self.formats = dict(formats)
        (self.block_tokens,) = {format.block_tokens for format in formats.values()}
        self.num_blocks = num_blocks
        self.device = device
        self.layers: list[dict[str, KVLayer]] = [
            {name: format.new_layer(num_blocks, device) for name, format in formats.items()} for _ in range(num_layers)
        ]

    def entries(self) -> Iterator[KVLayer]:
        """Those of all layers."""
        return (entry for layer in self.layers for entry in layer.values())

    @property
    def packed(self) -> bool:
        """Whether the native CPU kernels read all of it."""
        return all(format.arrangement is TILES for format in self.formats.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.entries() for tensor in entry.tensors)
