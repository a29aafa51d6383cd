"""Content hashes of a prompt's KV blocks, by which the prefix cache finds them."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from hashlib import sha256
from itertools import compress, count
from operator import ne

from longhelix.scheduler.request import ImageSpan, Request
from longhelix.scheduler.step import TOKEN_BYTES

_HASHED_AT_ONCE = 16  # blocks


class Chain:
    """The hashes of the blocks that a prompt fills, computed on demand.

    A block's hash is the SHA-256 of the hash before it, the digests of the images that begin in it, and its tokens.

    Args:
        root: the hash before the first block.
        hashes: those of the first blocks, if they are known.
    """

    def __init__(self, root: bytes, request: Request, block_tokens: int, hashes: Items[bytes] = ()) -> None:
        self.root = root
        self.num_blocks = len(request.prompt_token_ids) // block_tokens
        self._request = request
        self._block_tokens = block_tokens
        self._hashes = list(hashes)

    @property
    def num_hashed(self) -> int:
        """Number of blocks that have been hashed."""
        return len(self._hashes)

    def __getitem__(self, index: int) -> bytes:
        """Return the hash of a block that has been hashed, or of the next one."""
        if index == len(self._hashes):
            self._hash(min(_HASHED_AT_ONCE, self.num_blocks - index))
        return self._hashes[index]

    def since(self, start: int) -> Iterator[bytes]:
        """Yield the hashes of all blocks from `start` on, computed on demand."""
        hashes = self._hashes
        for index in range(start, self.num_blocks):
            yield hashes[index] if index < len(hashes) else self[index]

    def is_behind(self, other: "Chain") -> bool:
        """Return whether both prompts have the same blocks so far, and the other one has more hashes."""
        at = self.num_hashed
        return at < other.num_hashed and self.before(at) == other.before(at)

    def copy(self, other: "Chain") -> None:
        """Copy further hashes from a prompt that this one is behind, as far as both have the same tokens.

        This takes a fiftieth of the time that hashing takes.
        """
        if self._request.images or other._request.images:
            return
        tokens, other_tokens = self._request.prompt_token_ids, other._request.prompt_token_ids
        same, most = self.num_hashed, min(self.num_blocks, other.num_hashed)
        num_blocks = most - same  # that are compared next
        while num_blocks:
            start, stop = same * self._block_tokens, (same + num_blocks) * self._block_tokens
            if tokens[start:stop] == other_tokens[start:stop]:
                same += num_blocks
                num_blocks = min(num_blocks, most - same)
            else:
                num_blocks //= 2
        self._hashes += other._hashes[self.num_hashed : same]

    def before(self, index: int) -> bytes:
        """Return the hash before a block."""
        return self._hashes[index - 1] if index else self.root

    def all(self) -> list[bytes]:
        """Return the hashes of all blocks."""
        if self.num_hashed < self.num_blocks:
            self._hash(self.num_blocks - self.num_hashed)
        return self._hashes

    def num_same(self, start: int, most_blocks: int, hashes: Items[bytes]) -> int:
        """Return how many blocks from `start` to `most_blocks` have the given hashes, up to the first difference."""
        # Known hashes are compared without a loop in Python, because there may be a hundred thousand.
        known = self._hashes[start : min(start + len(hashes), most_blocks)]
        same = next(compress(count(), map(ne, known, hashes)), len(known))
        if same == len(known):
            most = min(len(hashes), most_blocks - start)
            while same < most and self[start + same] == hashes[same]:
                same += 1
        return same

    def _hash(self, num_blocks: int) -> None:
        """Hash the next blocks."""
        start, size = self.num_hashed * self._block_tokens, num_blocks * self._block_tokens
        token_bytes = self._request.prompt_token_ids[start : start + size].tobytes()
        self._hashes += block_hashes(self.before(self.num_hashed), token_bytes, num_blocks, start, self._request.images)


def block_hashes(
    before: bytes, token_bytes: bytes, num_blocks: int, start: int, images: Items[ImageSpan]
) -> list[bytes]:
    """Return the hashes of blocks that follow each other.

    Args:
        before: the hash before the first block.
        token_bytes: tokens of all blocks.
        start: position of the first token.
        images: those of the whole prompt.
    """
    size, hashes = len(token_bytes) // num_blocks, list[bytes]()
    if not images:
        for at in range(0, len(token_bytes), size):
            before = sha256(before + token_bytes[at : at + size]).digest()
            hashes.append(before)
        return hashes
    for at in range(0, len(token_bytes), size):
        shown = _digests(images, start + at // TOKEN_BYTES, start + (at + size) // TOKEN_BYTES)
        before = sha256(before + shown + token_bytes[at : at + size]).digest()
        hashes.append(before)
    return hashes


def _digests(images: Items[ImageSpan], start: int, stop: int) -> bytes:
    """Return the digests of the images that begin from position `start` up to `stop`."""
    return b"".join(image.digest for image in images if start <= image.start < stop)
