"""Prefixes: the first tokens of a request whose KV other requests have computed."""

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
    """The first `num_tokens` of a request, whose KV all earlier steps together have filled.

    blocks: their KV blocks, in position order, or where these are swapped, their slots. Each has a holder, or keeps its
    content, at least until the next step is made. The last block need not be full, and tokens in it beyond `num_tokens`
    need not be those of the request. windows: the same of each group with a limit.
    """

    num_tokens: int = 0
    blocks: tuple[Block | Slot, ...] = ()
    windows: tuple[WindowPrefix, ...] = ()

    def full_blocks(self, block_tokens: int) -> tuple[Block | Slot, ...]:
        """The blocks that the prefix fills: all of them, or all but the last."""
        return self.blocks[: self.num_tokens // block_tokens]

    @cached_property
    def kept(self) -> tuple[Block, ...]:
        """Those of its blocks that are not swapped."""
        return kept(self.blocks)

    def swapped_tokens(self, block_tokens: int) -> int:
        """Those of its tokens whose KV is swapped, in any group."""
        if len(self.kept) == len(self.blocks) and not self.windows:
            return 0
        of_groups = ((0, self.blocks), *self.windows)
        places = {
            place for first, blocks in of_groups for place, block in enumerate(blocks, first) if isinstance(block, Slot)
        }
        return sum(min(block_tokens, self.num_tokens - place * block_tokens) for place in places)

    def seen_token_ids(self, request: Request) -> bytes:
        """`seen_ids` of the `KnownTokens`."""
        if request.sampling.repetition_penalty == 1:
            return b""
        return array("i", sorted(set(request.prompt_token_ids[: self.num_tokens]))).tobytes()

    def of_windows(self, num_windows: int) -> tuple[WindowPrefix, ...]:
        """Its blocks of each group with a limit; without a prefix there are none."""
        return self.windows if self.num_tokens else (WindowPrefix(),) * num_windows

    @property
    def copied(self) -> tuple[Block, ...]:
        """The block that it does not fill, in each group. It is not swapped."""
        (last,) = self.kept[-1:]
        return last, *kept([window.blocks[-1] for window in self.windows])

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
    """Prefixes of full KV blocks, found by their hashes, see `Chain`.

    index: blocks by hash, as the allocators have them.
    swapped: slots by hash.
    matches: cached prefixes of waiting requests.
    windows: the groups with a limit.
    root: gives everything but the tokens that a request's KV depends on. The hash before a prompt's first block is that
        of it and of the request's salt.
    record: learns what blocks contain before they are named; None: nobody records it.
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
        self._chains: dict[int, Chain] = {}  # of requests that were looked for

    def find(self, request: Request) -> Prefix:
        blocks = list[Block | Slot]()
        found, swapped = self._index.get, self._swapped.get
        for digest in self._chain(request).since(0):
            block = found(digest) or swapped(digest)
            if block is None:
                break
            blocks.append(block)
        return Prefix(len(blocks) * self._block_tokens, tuple(blocks))

    def within_windows(self, request: Request, prefix: Prefix) -> Prefix:
        """The longest part of a prefix for which all groups with a limit have what the next row sees."""
        if not self._windows:
            return prefix
        hash_at, num_tokens = self._chain(request).__getitem__, prefix.num_tokens
        # By group the place from which on all are there up to the end of what is left: each is looked at once.
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
                there = tuple(
                    window.cached(first, blocks, hash_at) for window, first in zip(self._windows, firsts, strict=True)
                )
                full = num_tokens // self._block_tokens
                if full == stop or not any(isinstance(each[-1], Slot) for each in (blocks, *(w.blocks for w in there))):
                    return Prefix(num_tokens, blocks, there)
                # A block that is not full is copied in all groups, but what is swapped cannot be copied.
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
        """How many blocks of a waiting request's prompt have been hashed."""
        return self._chain(request).num_hashed

    def _is_found(self, chain: Chain) -> bool:
        """Whether the last block that was hashed is cached, if there is any."""
        last = chain.before(chain.num_hashed)
        return not chain.num_hashed or last in self._index or last in self._swapped

    def know(self, request: Request, hashes: Items[bytes]) -> None:
        """Store the known hashes of a waiting request's first blocks. They are not computed again."""
        self._chains[request.id] = self._new_chain(request, hashes)

    def match(self, request: Request, most_blocks: int) -> Match:
        """The blocks that `find` would give, at most so many. Looks at none of them again that it has seen before."""
        match = self._match_of.get(request.id)
        if match is None:
            match = self._match_of[request.id] = self._matches.new()
        chain = self._chain(request)
        self._matches.extend(match, min(most_blocks, chain.num_blocks), chain)
        return match

    def is_alike(self, request: Request) -> bool:
        """Whether a prompt begins as that of a waiting request does that has been matched."""
        chain = self._chain(request)
        return chain.num_blocks > 0 and self._matches.has(chain[0])

    def _chain(self, request: Request) -> Chain:
        """The hashes of a waiting request's prompt."""
        chain = self._chains.get(request.id)
        if chain is None:
            chain = self._chains[request.id] = self._new_chain(request)
        return chain

    def _new_chain(self, request: Request, hashes: Items[bytes] = ()) -> Chain:
        # Of one length and by a word apart, so that no salt is what blocks are hashed from.
        salt = sha256(request.service.cache_salt.encode()).digest()
        root = sha256(b"root" + sha256(self._root(request)).digest() + salt).digest()
        return Chain(root, request, self._block_tokens, hashes)

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the blocks that a prompt fills. Any thread may call it."""
        return self._new_chain(request).all()

    def learn(self, request: Request, hashes: Items[bytes]) -> None:
        """Let the record know the first blocks of a prompt, by their hashes."""
        if self._record is not None:
            token_bytes = request.prompt_token_ids[: len(hashes) * self._block_tokens].tobytes()
            self._record.learn(hashes, None, token_bytes, 0, request)

    def forget(self, request_id: int) -> None:
        """It waits no longer."""
        self._chains.pop(request_id, None)
        match = self._match_of.pop(request_id, None)
        if match is not None:
            self._matches.drop(match)

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """A sequence begins with the first `num_blocks` of the prefix that was found for it."""
        seq.unhashed.parent_hash = self._chain(seq.request).before(num_blocks)
        self.forget(seq.id)

    def named(self, seq: Sequence) -> tuple[list[Block], list[bytes], int]:
        """The blocks of a sequence that are full by now and have no hash yet, their hashes, and the position of their
        first token."""
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
