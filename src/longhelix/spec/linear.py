"""Linear attention: a state of fixed size in place of keys and values."""

import msgspec

from longhelix.errors import UserError

_CHUNK_TOKENS = 64  # of the form for many rows, in flash-linear-attention and transformers


class LinearAttention(msgspec.Struct, frozen=True, tag=True):
    """Gated DeltaNet (arXiv 2412.06464).

    Each value head has a state of `key_size` x `value_size` numbers per request. Each key head has a query, and serves
    the same number of value heads. Queries, keys and values pass through a convolution over the last `kernel_size`
    tokens. A request keeps all of these tokens except one.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel_size: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UserError(
                f"{self.num_value_heads} value heads are not a multiple of {self.num_key_heads} key heads: correct "
                "linear_num_value_heads or linear_num_key_heads in the model's config",
                "invalid_model",
            )

    @property
    def row_flops(self) -> int:
        """FLOP of a row and value head, row by row: the key reads the state and writes it, and the query reads it."""
        return 6 * self.key_size * self.value_size

    @property
    def chunk_row_flops(self) -> int:
        """FLOP of a row and value head in chunks of 64 rows: `row_flops`, and the products within its chunk: keys by
        keys, queries by keys, the inverse by keys and values, and weights by values."""
        return self.row_flops + _CHUNK_TOKENS * (6 * self.key_size + 4 * self.value_size)
