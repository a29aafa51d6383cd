"""Prefixes that somebody holds: those of saved contexts."""

from array import array

from longhelix.kv.blocks import Block
from longhelix.request import Request
from longhelix.scheduler.prefix import NO_PREFIX, Prefix


class HeldPrefixes:
    """Token ids with the KV blocks that they fill, by name."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._held: dict[str, tuple[array[int], tuple[Block, ...]]] = {}

    def hold(self, name: str, token_ids: "array[int]", blocks: tuple[Block, ...]) -> None:
        self._held[name] = token_ids[: len(blocks) * self._block_tokens], blocks

    def drop(self, name: str) -> tuple[Block, ...]:
        return self._held.pop(name, (None, ()))[1]

    def find(self, request: Request) -> Prefix:
        """The longest that a request begins with as a whole."""
        found = (
            Prefix(len(token_ids), blocks)
            for token_ids, blocks in self._held.values()
            if request.prompt_token_ids[: len(token_ids)] == token_ids
        )
        return max(found, key=lambda prefix: prefix.num_tokens, default=NO_PREFIX)
