"""The paged pool: this rank's bytes of all KV blocks, layer by layer."""

import torch

from longhelix.kernels import KVFormat, KVLayer


class KVPool:
    """`layers` hold keys and values, one for each layer of the rank's stage; contents start undefined."""

    def __init__(self, format: KVFormat, num_layers: int, num_blocks: int, device: torch.device) -> None:
        self.format = format
        self.num_blocks = num_blocks
        self.device = device
        self.layers: list[KVLayer] = [format.new_layer(num_blocks, device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.values.nbytes + (0 if layer.scales is None else layer.scales.nbytes) for layer in self.layers)
