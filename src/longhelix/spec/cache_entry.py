"""What a layer keeps of every token."""

from dataclasses import dataclass

from longhelix.spec.formats import NumberFormat


@dataclass(frozen=True)
class CacheEntry:
    """What a layer keeps of a token: a key and a value of each KV head.

    shared_values: the value is the first channels of the key, and is not kept separately.
    """

    name: str
    key_size: int
    value_size: int
    shared_values: bool = False

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Channels of what is kept of one token and head."""
        return (self.key_size,) if self.shared_values else (self.key_size, self.value_size)

    def head_bytes(self, number: NumberFormat, device: str) -> float:
        """Bytes of one token and head on "cpu" or "cuda"."""
        scales = number.kv_scales(device)
        return sum(number.vector_bits(size, scales) for size in self.vector_sizes) / 8
