"""Multi-head latent attention: one latent per token takes the place of its keys and values."""

import math
from dataclasses import dataclass

from longhelix.errors import UserError


@dataclass(frozen=True)
class MLA:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in channels.

    A token's cache entry is its latent of `kv_lora_rank` and a rotated key of `rope_size` that all heads share. A
    query head has `nope_size` channels without and `rope_size` with rotation, and a value `value_size`. Queries come
    from a latent of `q_lora_rank`, or if that is None, from the hidden state. `interleaved`: the checkpoint has
    the two channels that rotate together side by side, otherwise in two halves.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_size: int
    rope_size: int
    value_size: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.rope_size % 2:
            raise UserError(
                f"qk_rope_head_dim {self.rope_size} is odd: rotary embedding needs an even size", "invalid_model"
            )

    @property
    def cached_size(self) -> int:
        """Numbers that a layer caches for a token."""
        return self.kv_lora_rank + self.rope_size

    @property
    def direct_rows(self) -> float:
        """The fewest rows of a sequence for which making keys and values of its latents saves FLOP.

        Per visible token and head, T rows take 2 T (2 kv_lora_rank + rope_size) FLOP absorbed, and direct
        2 T (nope_size + rope_size + value_size) and, once, 2 kv_lora_rank (nope_size + value_size). Inf if never.
        """
        made = self.nope_size + self.value_size
        saved = 2 * self.kv_lora_rank - made
        return self.kv_lora_rank * made / saved if saved > 0 else math.inf
