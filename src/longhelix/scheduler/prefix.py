"""Prefixes: the first tokens of a request, whose KV is already cached."""

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from typing import Protocol

from longhelix.scheduler.cache_record import CacheRecord
from longhelix.scheduler.chain import Chain, block_hashes
from longhelix.scheduler.kv.blocks import Block, Slot, kept
from longhelix.scheduler.kv.windows import WindowGroup, WindowPrefix
from longhelix.scheduler.matches import Match, Matches
from longhelix.scheduler.request import Request
from longhelix.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a request, whose KV earlier steps have computed.

    Attributes:
        num_tokens: Number of these tokens.
        blocks: Their KV blocks, in position order, or the slots of swapped blocks. All keep their content at least
            until the next step is made. The last block need not be full, and may have other tokens beyond `num_tokens`.
        windows: Their blocks in each group with a limit.
    """

    num_tokens: int = 0
    blocks: tuple[Block | Slot, ...] = ()
    windows: tuple[WindowPrefix, ...] = ()

    def full_blocks(self, block_tokens: int) -> tuple[Block | Slot, ...]:
        """Return the blocks that the prefix fills: all of them, or all but the last."""
        return self.blocks[: self.num_tokens // block_tokens]

    @cached_property
    def kept(self) -> tuple[Block, ...]:
        """The blocks that are not swapped."""
        return kept(self.blocks)

    def swapped_tokens(self, block_tokens: int) -> int:
        """Return the number of tokens whose KV is swapped in any group."""
        if len(self.kept) == len(self.blocks) and not self.windows:
            return 0
        of_groups = ((0, self.blocks), *self.windows)
        places = {
            place for first, blocks in of_groups for place, block in enumerate(blocks, first) if isinstance(block, Slot)
        }
        return sum(min(block_tokens, self.num_tokens - place * block_tokens) for place in places)

    def seen_token_ids(self, request: Request) -> bytes:
        """Return the `seen_ids` of the request's `KnownTokens`."""
        if request.sampling.repetition_penalty == 1:
            return b""
        return array("i", sorted(set(request.prompt_token_ids[: self.num_tokens]))).tobytes()

    def of_windows(self, num_windows: int) -> tuple[WindowPrefix, ...]:
        """Return the blocks of each group with a limit. An empty prefix has none."""
        return self.windows if self.num_tokens else (WindowPrefix(),) * num_windows

    @property
    def copied(self) -> tuple[Block, ...]:
        """The block of each group that the prefix does not fill. It must not be swapped."""
        (last,) = self.kept[-1:]
        return last, *kept([window.blocks[-1] for window in self.windows])

    def cut(self, num_tokens: int, block_tokens: int) -> "Prefix":
        """Return the prefix, shortened to at most `num_tokens`."""
        num_tokens = min(self.num_tokens, num_tokens)
        return Prefix(num_tokens, self.blocks[: -(-num_tokens // block_tokens)])


NO_PREFIX = Prefix()


class Prefixes(Protocol):
    """Finds the prefixes of requests."""

    def find(self, request: Request) -> Prefix:
        """Return the longest prefix of a request. Called again in each step until the request starts."""
        ...


class PrefixCache:
    """Finds prefixes of full KV blocks by their hashes (`Chain`).

    Args:
        index: Blocks by hash, as the allocators have them.
        swapped: Slots by hash.
        matches: Cached prefixes of waiting requests.
        root: Returns everything that a request's KV depends on, except for the tokens. The hash before a prompt's first
            block is computed from this and the request's salt.
        record: Records the content of blocks before they become findable, if not None.
        windows: The groups with a limit.
    """

    def __init__(
        self,
        index: Mapping[bytes, Block],
        swapped: Mapping[bytes, Slot],
        matches: Matches,
        block_tokens: int,
        root: Callable[[Request], bytes] = lambda request: b"",
        record: CacheRecord | None = None,
        windows: Items[WindowGroup] = (),
    ) -> None:
        self._windows = windows
        self._record = record
        self._index = index
        self._swapped = swapped
        self._matches = matches
        self._match_of: dict[int, Match] = {}  # by request
        self._block_tokens = block_tokens
        self._root = root
        self._chains: dict[int, Chain] = {}  # by waiting request

    def find(self, request: Request) -> Prefix:
        blocks = list[Block | Slot]()
        find_block, find_slot = self._index.get, self._swapped.get
        for digest in self._chain(request).since(0):
            block = find_block(digest) or find_slot(digest)
            if block is None:
                break
            blocks.append(block)
        return Prefix(len(blocks) * self._block_tokens, tuple(blocks))

    def within_windows(self, request: Request, prefix: Prefix) -> Prefix:
        """Return the longest part of a prefix whose next row sees only cached blocks in all groups with a limit."""
        if not self._windows:
            return prefix
        hash_at, num_tokens = self._chain(request).__getitem__, prefix.num_tokens
        # By group: the place from which all blocks are cached up to the end of the part. Each place is checked once.
        known_from = [len(prefix.blocks)] * len(self._windows)
        while num_tokens:
            stop = -(-num_tokens // self._block_tokens)
            firsts = [window.first_place(num_tokens) for window in self._windows]
            for at, (window, first) in enumerate(zip(self._windows, firsts, strict=True)):
                missing = window.last_missing(first, min(known_from[at], stop), prefix.blocks, hash_at)
                if missing is not None:
                    known_from[at], num_tokens = missing, missing * self._block_tokens
                    break
                known_from[at] = min(known_from[at], first)
            else:
                blocks = prefix.blocks[:stop]
                windows = tuple(
                    window.cached(first, blocks, hash_at) for window, first in zip(self._windows, firsts, strict=True)
                )
                full = num_tokens // self._block_tokens
                of_groups = (blocks, *(window.blocks for window in windows))
                if full == stop or not any(isinstance(group_blocks[-1], Slot) for group_blocks in of_groups):
                    return Prefix(num_tokens, blocks, windows)
                # The last block is not full, so it would be copied in all groups, but a swapped block cannot be copied.
                num_tokens = full * self._block_tokens
        return NO_PREFIX

    def hash_ahead(self, request: Request, most_blocks: int) -> tuple[int, bool]:
        """Hash a prompt as far as it is cached, about `most_blocks` further than before.

        `find` and `match` then hash only a few blocks themselves.

        Returns:
            How many blocks were hashed, and whether that was all.
        """
        chain = self._chain(request)
        if chain.num_hashed < chain.num_blocks and self._is_found(chain):
            # Many questions about one document may wait: it is hashed for one of them.
            ahead = [other for other in self._chains.values() if chain.is_behind(other)]
            if ahead:
                chain.copy(max(ahead, key=attrgetter("num_hashed")))
        before = chain.num_hashed
        while chain.num_hashed < chain.num_blocks and self._is_found(chain):
            if chain.num_hashed - before >= most_blocks:
                return chain.num_hashed - before, False
            chain[chain.num_hashed]
        return chain.num_hashed - before, True

    def num_hashed(self, request: Request) -> int:
        """Return how many blocks of a waiting request's prompt have been hashed."""
        return self._chain(request).num_hashed

    def _is_found(self, chain: Chain) -> bool:
        """Return whether the last hashed block is cached. True if no block has been hashed."""
        last = chain.before(chain.num_hashed)
        return not chain.num_hashed or last in self._index or last in self._swapped

    def know(self, request: Request, hashes: Items[bytes]) -> None:
        """Store the known hashes of a waiting request's first blocks. They are not computed again."""
        self._chains[request.id] = self._new_chain(request, hashes)

    def match(self, request: Request, most_blocks: int) -> Match:
        """Return the match of the first `most_blocks` blocks that `find` would return. Visits each block only once."""
        match = self._match_of.get(request.id)
        if match is None:
            match = self._match_of[request.id] = self._matches.new()
        chain = self._chain(request)
        self._matches.extend(match, min(most_blocks, chain.num_blocks), chain)
        return match

    def is_alike(self, request: Request) -> bool:
        """Return whether a prompt has the same first block as a waiting request that has a match."""
        chain = self._chain(request)
        return chain.num_blocks > 0 and self._matches.has(chain[0])

    def _chain(self, request: Request) -> Chain:
        """Return the hashes of a waiting request's prompt."""
        chain = self._chains.get(request.id)
        if chain is None:
            chain = self._chains[request.id] = self._new_chain(request)
        return chain

    def _new_chain(self, request: Request, hashes: Items[bytes] = ()) -> Chain:
        # Digests have a fixed length and "root" marks them, so no salt can imitate the input of a block's hash.
        salt = sha256(request.service.cache_salt.encode()).digest()
        root = sha256(b"root" + sha256(self._root(request)).digest() + salt).digest()
        return Chain(root, request, self._block_tokens, hashes)

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the blocks that a prompt fills. Any thread may call it."""
        return self._new_chain(request).all()

    def learn(self, request: Request, hashes: Items[bytes]) -> None:
        """Tell the record the content of the first blocks of a prompt, by their hashes."""
        if self._record is not None:
            token_bytes = request.prompt_token_ids[: len(hashes) * self._block_tokens].tobytes()
            self._record.learn(hashes, None, token_bytes, 0, request)

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a waiting request."""
        self._chains.pop(request_id, None)
        match = self._match_of.pop(request_id, None)
        if match is not None:
            self._matches.drop(match)

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """Start a sequence with the first `num_blocks` of its prefix."""
        seq.unhashed.parent_hash = self._chain(seq.request).before(num_blocks)
        self.forget(seq.id)

    def named(self, seq: Sequence) -> tuple[list[Block], list[bytes], int]:
        """Hash the full blocks of a sequence that have no hash yet.

        Returns:
            The blocks, their hashes, and the position of their first token.
        """
        unhashed = seq.unhashed
        unnamed, block_tokens = unhashed.blocks, self._block_tokens
        start = (seq.kv.num_blocks - len(unnamed)) * block_tokens
        full = min((seq.known_length - start) // block_tokens, len(unnamed))
        if full < 1:
            return [], [], start
        blocks, token_bytes = unnamed[:full], seq.token_bytes(start, start + full * block_tokens)
        hashes = block_hashes(unhashed.parent_hash, token_bytes, full, start, seq.request.images)
        if self._record is not None:
            self._record.learn(hashes, unhashed.parent_hash if start else None, token_bytes, start, seq.request)
        del unnamed[:full]
        unhashed.parent_hash = hashes[-1]
        return blocks, hashes, start
