"""Prefixes: the first tokens of a request whose KV other requests have computed."""

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

from longhelix.kv.blocks import Block, Slot, kept
from longhelix.request import ImageSpan, Request
from longhelix.scheduler.matches import Match, Matches
from longhelix.scheduler.sequence import Sequence
from longhelix.step import TOKEN_BYTES

_HASHED_AT_ONCE = 16  # blocks of a prompt that is looked for


@dataclass(frozen=True)
class Prefix:
    """The first `num_tokens` of a request, whose KV all earlier steps together have filled.

    blocks: their KV blocks, in position order, or where these are swapped, their slots. Each has a holder, or keeps its
    content, at least until the next step is made. The last block need not be full, and tokens in it beyond `num_tokens`
    need not be those of the request.
    """

    num_tokens: int = 0
    blocks: tuple[Block | Slot, ...] = ()

    def full_blocks(self, block_tokens: int) -> tuple[Block | Slot, ...]:
        """The blocks that the prefix fills: all of them, or all but the last."""
        return self.blocks[: self.num_tokens // block_tokens]

    @cached_property
    def kept(self) -> tuple[Block, ...]:
        """Those of its blocks that are not swapped."""
        return kept(self.blocks)

    def swapped_tokens(self, block_tokens: int) -> int:
        """Those of its tokens whose KV is swapped."""
        if len(self.kept) == len(self.blocks):
            return 0
        return sum(
            min(block_tokens, self.num_tokens - index * block_tokens)
            for index, block in enumerate(self.blocks)
            if isinstance(block, Slot)
        )

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


class PrefixCache:
    """Prefixes of full KV blocks, by what is in them and before them: each block's hash is the SHA-256 of the hash
    before it, the digests of the images that begin in it, and its tokens; a request's first one is that of its root and
    its salt.

    index: blocks by hash, as the allocators have them.
    swapped: slots by hash.
    matches: cached prefixes of waiting requests.
    root: gives everything but the tokens that a request's KV depends on. Its hash begins the chain.
    """

    def __init__(
        self,
        index: Mapping[bytes, Block],
        swapped: Mapping[bytes, Slot],
        matches: Matches,
        block_tokens: int,
        root: Callable[[Request], bytes] = lambda request: b"",
    ) -> None:
        self._index = index
        self._swapped = swapped
        self._matches = matches
        self._match_of: dict[int, Match] = {}  # by request
        self._block_tokens = block_tokens
        self._root = root
        self._chains: dict[int, list[bytes]] = {}  # of requests that were looked for, as far as they were found

    def find(self, request: Request) -> Prefix:
        blocks, hash_of = list[Block | Slot](), self._hashing(request)
        chain, found, swapped = self._chains[request.id], self._index.get, self._swapped.get
        for index in range(self._num_full(request)):
            digest = chain[index + 1] if len(chain) > index + 1 else hash_of(index)
            block = found(digest) or swapped(digest)
            if block is None:
                break
            blocks.append(block)
        return Prefix(len(blocks) * self._block_tokens, tuple(blocks))

    def hash_ahead(self, request: Request, most_blocks: int) -> tuple[int, bool]:
        """Hash a prompt as far as it is cached, about `most_blocks` further than before.

        `find` and `match` then hash at most `_HASHED_AT_ONCE` blocks themselves.

        Returns:
            How many blocks were hashed, and whether that was all.
        """
        hash_of, chain = self._hashing(request), self._chains[request.id]
        before, num_full = len(chain), self._num_full(request)
        while len(chain) <= num_full and self._is_found(chain):
            if len(chain) - before >= most_blocks:
                return len(chain) - before, False
            hash_of(len(chain) - 1)
        return len(chain) - before, True

    def _is_found(self, chain: list[bytes]) -> bool:
        """Whether the last block that was hashed is cached. The first hash of a chain is that of no block."""
        return len(chain) == 1 or chain[-1] in self._index or chain[-1] in self._swapped

    def know(self, request_id: int, chain: Items[bytes]) -> None:
        """Set the first hashes of a waiting request's chain, so that they are not computed again."""
        self._chains[request_id] = list(chain)

    def match(self, request: Request, most_blocks: int) -> Match:
        """The blocks that `find` would give, at most so many. Looks at none of them again that it has seen before."""
        match = self._match_of.get(request.id)
        if match is None:
            match = self._match_of[request.id] = self._matches.new()
        self._matches.extend(match, min(most_blocks, self._num_full(request)), self._hashing(request))
        return match

    def _num_full(self, request: Request) -> int:
        """How many blocks a prompt fills."""
        return len(request.prompt_token_ids) // self._block_tokens

    def _hashing(self, request: Request) -> Callable[[int], bytes]:
        """Gives the hashes of a prompt's blocks by index: those that are known, or the next one."""
        chain = self._chains.setdefault(request.id, [])
        if not chain:
            chain.append(self._first(request))
        tokens, images, size = request.prompt_token_ids, request.images, self._block_tokens
        num_full = self._num_full(request)

        def hash_of(index: int) -> bytes:
            if len(chain) == index + 1:
                start, count = index * size, min(_HASHED_AT_ONCE, num_full - index)
                chain.extend(_chain(chain[-1], tokens[start : start + count * size].tobytes(), count, start, images))
            return chain[index + 1]

        return hash_of

    def chain(self, request: Request) -> list[bytes]:
        """Return the root hash of a prompt, followed by the hash of each block that it fills.

        Any thread may call it.
        """
        first, num_full = self._first(request), self._num_full(request)
        if not num_full:
            return [first]
        token_bytes = request.prompt_token_ids[: num_full * self._block_tokens].tobytes()
        return [first, *_chain(first, token_bytes, num_full, 0, request.images)]

    def forget(self, request_id: int) -> None:
        """It waits no longer."""
        self._chains.pop(request_id, None)
        match = self._match_of.pop(request_id, None)
        if match is not None:
            self._matches.drop(match)

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """A sequence begins with the first `num_blocks` of the prefix that was found for it."""
        chain = self._chains.get(seq.id) or [self._first(seq.request)]
        seq.digest = chain[num_blocks]
        self.forget(seq.id)

    def named(self, seq: Sequence) -> tuple[list[Block], list[bytes], int]:
        """The blocks of a sequence that are full by now and have no hash yet, their hashes, and the position of their
        first token."""
        unnamed, block_tokens = seq.unnamed, self._block_tokens
        start = (seq.num_blocks - len(unnamed)) * block_tokens
        full = min((seq.known_length - start) // block_tokens, len(unnamed))
        if full < 1:
            return [], [], start
        blocks, token_bytes = unnamed[:full], seq.token_bytes(start, start + full * block_tokens)
        hashes = _chain(seq.digest, token_bytes, full, start, seq.request.images)
        del unnamed[:full]
        seq.digest = hashes[-1]
        return blocks, hashes, start

    def _first(self, request: Request) -> bytes:
        # Of one length and by a word apart, so that no salt is what blocks are hashed from.
        salt = sha256(request.service.cache_salt.encode()).digest()
        return sha256(b"root" + sha256(self._root(request)).digest() + salt).digest()


def _chain(before: bytes, token_bytes: bytes, num_blocks: int, start: int, images: Items[ImageSpan]) -> list[bytes]:
    """The hashes of `num_blocks` blocks with these tokens, from position `start` on, after the block with the hash
    `before`. `images`: those of the prompt."""
    size, hashes = len(token_bytes) // num_blocks, list[bytes]()
    if not images:
        for at in range(0, len(token_bytes), size):
            before = sha256(before + token_bytes[at : at + size]).digest()
            hashes.append(before)
        return hashes
    for at in range(0, len(token_bytes), size):
        shown = _begun(images, start + at // TOKEN_BYTES, start + (at + size) // TOKEN_BYTES)
        before = sha256(before + shown + token_bytes[at : at + size]).digest()
        hashes.append(before)
    return hashes


def _begun(images: Items[ImageSpan], start: int, stop: int) -> bytes:
    """The digests of the images that begin from `start` up to `stop`."""
    return b"".join(image.digest for image in images if start <= image.start < stop)
