"""Attention to chosen tokens: an indexer scores all tokens, and attention reads only the best ones."""

from dataclasses import dataclass

_SCALED_NUMBERS, _SCALE_BYTES = 128, 4


@dataclass(frozen=True)
class Indexer:
    """DeepSeek sparse attention (arXiv 2512.02556, section 2).

    It keeps a key of `head_size` channels of each token. The `num_heads` queries of a row score these keys, and the row
    attends to the `chosen_tokens` with the best scores.
    """

    num_heads: int
    head_size: int
    chosen_tokens: int

    @property
    def key_bytes(self) -> float:
        """Bytes of a token in one layer: FP8, with a scale for 128 channels (TensorRT-LLM, tech blog 15)."""
        return self.head_size + _SCALE_BYTES * -(-self.head_size // _SCALED_NUMBERS)

    @property
    def pair_flops(self) -> int:
        """FLOP of a row and a key."""
        return 2 * self.num_heads * self.head_size
