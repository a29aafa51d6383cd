"""Records what the prefix cache stores and removes, for subscribers outside of the engine."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

from longhelix.scheduler.request import Request
from longhelix.scheduler.step import TOKEN_BYTES

Tier = Literal["pool", "swap"]


class BlockContent(NamedTuple):
    """The content of a KV block that has a hash.

    parent: the hash of the block before it. None for the first block of a prompt.
    token_bytes: its tokens, int32 in this machine's byte order. keys: everything else that its hash depends on: the
    prompt's salt, in the first block, and the digests of the images in it.
    """

    parent: bytes | None
    token_bytes: bytes
    keys: tuple[str, ...] = ()


class StoredBlock(NamedTuple):
    """A block that has become findable.

    group: its KV group. 0: layers whose rows see everything; then those with a limit, in their order.
    """

    tier: Tier
    content_hash: bytes
    content: BlockContent
    group: int = 0


class RemovedBlock(NamedTuple):
    """A block that is findable no longer. group: see `StoredBlock`."""

    tier: Tier
    content_hash: bytes
    group: int = 0


class CacheChanges(NamedTuple):
    """The difference between two states of the prefix cache. A block is stored after the one before it."""

    stored: list[StoredBlock]
    removed: list[RemovedBlock]


class CacheRecord:
    """Collects the changes of the prefix cache until they are taken.

    It knows the content of all blocks that can be found, because blocks come back from their slots and move between
    ranks when nobody has their tokens at hand.

    In a KV group with a limit, a block can be found if it is on the rank whose block is found in group 0. So changes of
    both groups matter, and the record asks about each touched block when the changes are taken.

    Args:
        num_windows: The number of KV groups with a limit.
    """

    def __init__(self, num_windows: int = 0) -> None:
        self._of_windows: list[set[bytes]] = [set() for _ in range(num_windows)]  # hashes that can be found
        self._touched: dict[bytes, None] = {}  # hashes whose blocks of these groups may have changed
        self.contents: dict[bytes, BlockContent] = {}
        self._stored: dict[tuple[Tier, bytes], None] = {}
        self._removed: dict[tuple[Tier, bytes], None] = {}
        self._doubtful: set[bytes] = set()  # hashes of contents that may be needed no longer

    def learn(
        self, hashes: Items[bytes], parent: bytes | None, token_bytes: bytes, start: int, request: Request
    ) -> None:
        """Remember the contents of consecutive blocks of a request, before they are stored.

        Args:
            hashes: content hashes of the blocks.
            parent: see `BlockContent`, of the first of them.
            token_bytes: tokens of all blocks.
            start: position of the first token.
            request: whose blocks they are.
        """
        size = len(token_bytes) // max(len(hashes), 1)
        for index, content_hash in enumerate(hashes):
            at = index * size
            keys = _keys(request, start + at // TOKEN_BYTES, start + (at + size) // TOKEN_BYTES)
            self.know(content_hash, BlockContent(parent, token_bytes[at : at + size], keys))
            parent = content_hash

    def know(self, content_hash: bytes, content: BlockContent) -> None:
        """Remember the content of a block, before it is stored."""
        self.contents[content_hash] = content
        self._doubtful.add(content_hash)

    def stored(self, tier: Tier, hashes: Iterable[bytes]) -> None:
        """Record that blocks have become findable."""
        for content_hash in hashes:
            self.touch(content_hash)
            if (tier, content_hash) in self._removed:
                del self._removed[tier, content_hash]
            else:
                self._stored[tier, content_hash] = None

    def removed(self, tier: Tier, content_hash: bytes) -> None:
        """Record that a block is findable no longer."""
        self.touch(content_hash)
        self._doubtful.add(content_hash)
        if (tier, content_hash) in self._stored:
            del self._stored[tier, content_hash]
        else:
            self._removed[tier, content_hash] = None

    def touch(self, content_hash: bytes) -> None:
        """Note that a block may have become findable or unfindable in a KV group with a limit."""
        if self._of_windows:
            self._touched[content_hash] = None

    def take(
        self,
        is_found: Callable[[bytes], bool],
        leaving: Collection[bytes],
        windows: Items[Callable[[bytes], bool]] = (),
    ) -> CacheChanges:
        """Return the changes since the last call.

        Args:
            is_found: whether a block with this hash can be found.
            leaving: hashes of blocks that may be swapped.
            windows: `is_found` of each KV group with a limit.
        """
        changes = CacheChanges(
            [StoredBlock(tier, content_hash, self.contents[content_hash]) for tier, content_hash in self._stored],
            [RemovedBlock(tier, content_hash) for tier, content_hash in self._removed],
        )
        for group, (before, is_in_group) in enumerate(zip(self._of_windows, windows, strict=True), start=1):
            for content_hash in self._touched:
                is_there = is_in_group(content_hash)
                if is_there and content_hash not in before:
                    changes.stored.append(StoredBlock("pool", content_hash, self.contents[content_hash], group))
                    before.add(content_hash)
                elif not is_there and content_hash in before:
                    changes.removed.append(RemovedBlock("pool", content_hash, group))
                    before.discard(content_hash)
        self._touched.clear()
        self._stored.clear()
        self._removed.clear()
        lost = {content_hash for content_hash in self._doubtful if not is_found(content_hash)}
        self._doubtful = lost.intersection(leaving)
        for content_hash in lost.difference(leaving):
            del self.contents[content_hash]
        return changes


def _keys(request: Request, start: int, stop: int) -> tuple[str, ...]:
    """Return the keys of a request's block with the tokens from `start` to `stop`."""
    salt = request.service.cache_salt
    salts = (salt,) if salt and not start else ()
    return salts + tuple(image.digest.hex() for image in request.images if image.start < stop and start < image.stop)
