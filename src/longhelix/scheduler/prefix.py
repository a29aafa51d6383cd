"""Prefixes: KV that is there already for a request's first tokens."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from longhelix.kv.blocks import Block
from longhelix.request import Request


@dataclass(frozen=True)
class Prefix:
    """The first `num_tokens` of a request, of which steps before the next one fill the KV: `blocks`, in position order,
    somebody's as long as the next step is not made. The last of them need not be full, nor its further tokens the
    request's."""

    num_tokens: int = 0
    blocks: tuple[Block, ...] = ()

    def full_blocks(self, block_tokens: int) -> tuple[Block, ...]:
        """Those of its blocks that are full of it; at most one is not."""
        return self.blocks[: self.num_tokens // block_tokens]

    def seen_token_ids(self, request: Request) -> bytes:
        """As in `NewSequence`."""
        if request.sampling.repetition_penalty == 1:
            return b""
        return array("i", sorted(set(request.prompt_token_ids[: self.num_tokens]))).tobytes()

    def cut(self, num_tokens: int, block_tokens: int) -> "Prefix":
        """The same, but of `num_tokens` at most."""
        num_tokens = min(self.num_tokens, num_tokens)
        return Prefix(num_tokens, self.blocks[: -(-num_tokens // block_tokens)])


NO_PREFIX = Prefix()


class Prefixes(Protocol):
    """What the scheduler asks for KV that a request need not compute."""

    def find(self, request: Request) -> Prefix:
        """The longest prefix of a request that could run now; it is asked again in the next step if it cannot."""
        ...
