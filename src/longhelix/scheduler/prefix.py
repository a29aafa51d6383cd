"""Prefixes: the first tokens of a request whose KV other requests have computed."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from longhelix.kv.blocks import Block
from longhelix.request import Request


@dataclass(frozen=True)
class Prefix:
    """The first `num_tokens` of a request, whose KV all earlier steps together have filled.

    blocks: their KV blocks, in position order. Each has a holder at least until the next step is made. The last block
    need not be full, and tokens in it beyond `num_tokens` need not be those of the request.
    """

    num_tokens: int = 0
    blocks: tuple[Block, ...] = ()

    def full_blocks(self, block_tokens: int) -> tuple[Block, ...]:
        """The blocks that the prefix fills: all of them, or all but the last."""
        return self.blocks[: self.num_tokens // block_tokens]

    def seen_token_ids(self, request: Request) -> bytes:
        """`seen_token_ids` of the `NewSequence`."""
        if request.sampling.repetition_penalty == 1:
            return b""
        return array("i", sorted(set(request.prompt_token_ids[: self.num_tokens]))).tobytes()

    def cut(self, num_tokens: int, block_tokens: int) -> "Prefix":
        """The prefix, shortened to at most `num_tokens`."""
        num_tokens = min(self.num_tokens, num_tokens)
        return Prefix(num_tokens, self.blocks[: -(-num_tokens // block_tokens)])


NO_PREFIX = Prefix()


class Prefixes(Protocol):
    """What the scheduler asks for prefixes."""

    def find(self, request: Request) -> Prefix:
        """The longest prefix of a request that could start now. If the request cannot start, it is asked again in the
        next step."""
        ...
