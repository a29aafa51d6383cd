"""Placements: which KVP rank owns each KV block of a request.

Every placement is a list of owners. The closed forms below compute the same without the list. Attention is exact with
any placement, because it may be split over any partition of the keys (docs/internals/attention.md).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import cycle, islice
from math import inf
from typing import ClassVar, NamedTuple, Protocol

from longhelix.errors import UserError


class Share(NamedTuple):
    """The blocks that one rank owns, among consecutive blocks.

    Attributes:
        num: Number of its blocks.
        places: Their places among the consecutive blocks.
    """

    rank: int
    num: int
    places: slice

    def behind(self, num_blocks: int) -> "Share":
        """Return the share with its places moved behind `num_blocks` other blocks."""
        start, stop, step = self.places.start, self.places.stop, self.places.step
        return self._replace(places=slice(start + num_blocks, stop + num_blocks, step))


class Placement(Protocol):
    """Which KVP ranks of an attention group own the KV blocks of one request.

    Attributes:
        name: Its name in PLACEMENTS.
        spread: Whether the blocks go to all ranks at once, so that all ranks compute from the first row on.
        home: The only rank that computes at first. None if several ranks do.
        even: Whether all ranks have the same share of the tokens, to within a KV block.
        alone_tokens: Number of first tokens that are all on one rank.
        start: The rank of the first block.
    """

    @property
    def name(self) -> str: ...

    @property
    def spread(self) -> bool: ...

    @property
    def home(self) -> int | None: ...

    @property
    def even(self) -> bool: ...

    @property
    def alone_tokens(self) -> float: ...

    @property
    def kvp(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def order(self) -> tuple[int, ...]:
        """The KVP ranks in the order in which the request takes them, from `start` on."""
        ...

    def next_owner(self, last: int, count: int) -> int:
        """Return the KVP rank of the block after the first `count` blocks. Without blocks it is `start`.

        last: the owner of the last block. If it differs from the placement's own, all blocks that follow move on by the
            same number of ranks in `order`.
        """
        ...

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        """Return the shares of the next `num` blocks, in order, as repeated calls of `next_owner` would give them.

        A rank may have several shares.
        """
        ...

    def owner(self, position: int) -> int:
        """Return the KVP rank that keeps the token at `position`, in closed form."""
        ...

    def local_length(self, rank: int, length: int) -> int:
        """Return how many of the request's first `length` tokens `rank` keeps, in closed form."""
        ...


def striped_length(block_tokens: int, kvp: int, turn: int, length: int) -> int:
    """Return how many of `length` tokens the rank with turn `turn` gets, if `kvp` ranks take blocks in turn."""
    round_tokens = block_tokens * kvp
    full_rounds, rest = divmod(length, round_tokens)
    return full_rounds * block_tokens + min(max(rest - turn * block_tokens, 0), block_tokens)


@lru_cache
def in_turn(kvp: int, start: int) -> tuple[int, ...]:
    """Return all ranks in ascending order from `start` on, then those before it."""
    return (*range(start, kvp), *range(start))


@lru_cache
def _stripes(order: tuple[int, ...], first: int, start: int, stop: int) -> tuple[Share, ...]:
    """Return the shares of the blocks from `start` to `stop`, which ranks take in turn from rank `first` on."""
    kvp, turn = len(order), order.index(first)
    places = [slice(place, stop, kvp) for place in range(start, min(start + kvp, stop))]
    return tuple(Share(order[(turn + at) % kvp], len(range(stop)[where]), where) for at, where in enumerate(places))


@dataclass(frozen=True)
class Striped:
    """Ranks take blocks round robin, from a start rank per request (Helix's staggered KV, section 2.3)."""

    name: ClassVar[str] = "striped"
    spread: ClassVar[bool] = True
    home: ClassVar[None] = None
    even: ClassVar[bool] = True
    alone_tokens: ClassVar[float] = 0
    kvp: int
    block_tokens: int
    start: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        return in_turn(self.kvp, self.start)

    def next_owner(self, last: int, count: int) -> int:
        return (last + 1) % self.kvp if count else self.start

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        return _stripes(in_turn(self.kvp, 0), self.next_owner(last, count), 0, num)

    def owner(self, position: int) -> int:
        return (self.start + position // self.block_tokens) % self.kvp

    def local_length(self, rank: int, length: int) -> int:
        return striped_length(self.block_tokens, self.kvp, (rank - self.start) % self.kvp, length)


@dataclass(frozen=True)
class Growing:
    """Ranks join one by one, when the last one has `limit_tokens` (Medha's dynamic KVP). Then blocks are striped.

    Attributes:
        limit_tokens: A multiple of the block.
        later: The ranks after `start`, in the order in which they join. Empty: in ascending order.
    """

    name: ClassVar[str] = "growing"
    spread: ClassVar[bool] = False
    kvp: int
    block_tokens: int
    limit_tokens: int
    start: int = 0
    later: tuple[int, ...] = ()

    @property
    def home(self) -> int:
        return self.start

    @property
    def even(self) -> bool:
        return self.kvp == 1

    @property
    def alone_tokens(self) -> float:
        return self.limit_tokens

    @cached_property
    def order(self) -> tuple[int, ...]:
        return (self.start, *self.later) if self.later else in_turn(self.kvp, self.start)

    def swapped(self, first: int, second: int) -> "Growing":
        """Return the placement with two of the later ranks exchanged."""
        places = {first: second, second: first}
        return replace(self, later=tuple(places.get(rank, rank) for rank in self.order[1:]))

    def openings(self, first: int, stop: int) -> range:
        """Return the indices from `first` to `stop` of the blocks at which a later rank joins."""
        limit_blocks = self.limit_tokens // self.block_tokens
        next_turn = max(-(-first // limit_blocks), 1)
        return range(next_turn * limit_blocks, min(stop, self.kvp * limit_blocks), limit_blocks)

    def __post_init__(self) -> None:
        if self.limit_tokens < 1 or self.limit_tokens % self.block_tokens:
            raise UserError(
                f"the growth limit is {self.limit_tokens} tokens: set it to a multiple of the KV block, "
                f"{self.block_tokens} tokens"
            )

    def next_owner(self, last: int, count: int) -> int:
        limit_blocks = self.limit_tokens // self.block_tokens
        if not count:
            return self.start
        if count >= self.kvp * limit_blocks or count % limit_blocks == 0:
            return self.order[(self.order.index(last) + 1) % self.kvp]
        return last

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        limit_blocks = self.limit_tokens // self.block_tokens
        growing, shares = min(num, self.kvp * limit_blocks - count), list[Share]()
        start = 0
        while start < growing:
            last = self.next_owner(last, count + start)
            stop = min(start + limit_blocks - (count + start) % limit_blocks, growing)
            shares.append(Share(last, stop - start, slice(start, stop)))
            start = stop
        return [*shares, *_stripes(self.order, self.next_owner(last, count + start), start, num)]

    def owner(self, position: int) -> int:
        filled = self.kvp * self.limit_tokens
        beyond = position - filled
        turn = position // self.limit_tokens if beyond < 0 else beyond // self.block_tokens
        return self.order[turn % self.kvp]

    def local_length(self, rank: int, length: int) -> int:
        turn = self.order.index(rank)
        filling = min(max(length - turn * self.limit_tokens, 0), self.limit_tokens)
        beyond = max(length - self.kvp * self.limit_tokens, 0)
        return filling + striped_length(self.block_tokens, self.kvp, turn, beyond)


@dataclass(frozen=True)
class Local:
    """All blocks on one rank (data-parallel attention, for short requests)."""

    name: ClassVar[str] = "local"
    spread: ClassVar[bool] = False
    alone_tokens: ClassVar[float] = inf
    kvp: int
    block_tokens: int
    start: int = 0

    @property
    def home(self) -> int:
        return self.start

    @property
    def even(self) -> bool:
        return self.kvp == 1

    @property
    def order(self) -> tuple[int, ...]:
        return in_turn(self.kvp, self.start)

    def next_owner(self, last: int, count: int) -> int:
        return last if count else self.start

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        return [Share(self.next_owner(last, count), num, slice(0, num))]

    def owner(self, position: int) -> int:
        return self.start

    def local_length(self, rank: int, length: int) -> int:
        return length if rank == self.start else 0


@dataclass(frozen=True)
class Behind:
    """Placement that continues `base` behind existing blocks when only their number on each rank is known.

    Attributes:
        blocks_by_owner: Number of existing blocks on each KVP rank.
        last: The rank of the last one.
    """

    base: Placement
    blocks_by_owner: Counter[int]
    last: int

    @property
    def kvp(self) -> int:
        return self.base.kvp

    @property
    def block_tokens(self) -> int:
        return self.base.block_tokens

    @property
    def order(self) -> tuple[int, ...]:
        return self.base.order

    @cached_property
    def num_blocks(self) -> int:
        return self.blocks_by_owner.total()

    @cached_property
    def _turn(self) -> int:
        """Number of ranks in the order from the owner that `base` alone would choose to the next owner."""
        base, order = self.base, self.order
        return order.index(base.next_owner(self.last, self.num_blocks)) - order.index(
            base.owner(self.num_blocks * self.block_tokens)
        )

    def _turned(self, rank: int, turn: int) -> int:
        """Return the rank that is `turn` places later in the order."""
        return self.order[(self.order.index(rank) + turn) % self.kvp]

    def owner(self, position: int) -> int:
        """Return the KVP rank that keeps the token at `position`, which is behind the existing blocks."""
        return self._turned(self.base.owner(position), self._turn)

    def local_length(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens `rank` keeps. `length` includes all existing blocks."""
        turned = self._turned(rank, -self._turn)
        existing = self.num_blocks * self.block_tokens
        added = self.base.local_length(turned, length) - self.base.local_length(turned, existing)
        return self.blocks_by_owner[rank] * self.block_tokens + added


@dataclass(frozen=True)
class Continued:
    """Placement that continues `base` behind existing blocks, which another request may have placed differently.

    Attributes:
        owners: The owner of each existing block, in position order. At least one.
    """

    base: Placement
    owners: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def spread(self) -> bool:
        return self.base.spread

    @property
    def home(self) -> int | None:
        return None if self.spread or len(self.blocks_by_owner) > 1 else self.start

    @cached_property
    def even(self) -> bool:
        ranks = cycle(in_turn(self.kvp, self.start))
        return self.base.even and self.owners == tuple(islice(ranks, len(self.owners)))

    @property
    def alone_tokens(self) -> float:
        return self.base.alone_tokens

    @property
    def kvp(self) -> int:
        return self.base.kvp

    @property
    def block_tokens(self) -> int:
        return self.base.block_tokens

    @property
    def start(self) -> int:
        return self.owners[0]

    @property
    def order(self) -> tuple[int, ...]:
        return self.base.order

    @property
    def tokens(self) -> int:
        """Number of tokens of the existing blocks when all of them are full."""
        return len(self.owners) * self.block_tokens

    def follows(self, placement: Placement) -> bool:
        """Return whether `placement` would have put the existing blocks where they are."""
        return all(placement.owner(index * self.block_tokens) == owner for index, owner in enumerate(self.owners))

    @cached_property
    def blocks_by_owner(self) -> Counter[int]:
        """Number of existing blocks on each KVP rank."""
        return Counter(self.owners)

    @cached_property
    def _behind(self) -> Behind:
        return Behind(self.base, self.blocks_by_owner, self.owners[-1])

    def next_owner(self, last: int, count: int) -> int:
        return self.owners[count] if count < len(self.owners) else self.base.next_owner(last, count)

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        existing = self.owners[count : count + num]
        if not existing:
            return self.base.shares(last, count, num)
        shares = [Share(owner, 1, slice(place, place + 1)) for place, owner in enumerate(existing)]
        if len(existing) == num:
            return shares
        behind = self.base.shares(existing[-1], count + len(existing), num - len(existing))
        return [*shares, *(share.behind(len(existing)) for share in behind)]

    def owner(self, position: int) -> int:
        if position < self.tokens:
            return self.owners[position // self.block_tokens]
        return self._behind.owner(position)

    def local_length(self, rank: int, length: int) -> int:
        if length < self.tokens:
            blocks, rest = divmod(length, self.block_tokens)
            return self.owners[:blocks].count(rank) * self.block_tokens + rest * (self.owners[blocks] == rank)
        return self._behind.local_length(rank, length)


def blocks_needed(placement: Placement | Behind, tokens: int) -> list[int]:
    """Return the number of blocks on each KVP rank for the first `tokens` tokens of a request."""
    return [-(-placement.local_length(rank, tokens) // placement.block_tokens) for rank in range(placement.kvp)]


PLACEMENTS = ("striped", "growing", "local")


def placement_by_length(prompt_tokens: int, capacity_tokens: int, threshold_tokens: int) -> str:
    """Return the name of the placement for a request of these lengths. Other requests do not influence it.

    It is local if the whole request stays within the threshold, growing if only its answer may exceed it, and striped
    if its prompt exceeds it.
    """
    if capacity_tokens <= threshold_tokens:
        return "local"
    return "growing" if prompt_tokens <= threshold_tokens else "striped"


def make_placement(
    kind: str, kvp: int, block_tokens: int, growth_limit_tokens: int, start: int, later: tuple[int, ...] = ()
) -> Placement:
    """Return the placement of one request by name. Raises UserError if the name is not in PLACEMENTS."""
    if block_tokens < 1:
        raise UserError(f"block_tokens is {block_tokens}: set it to 1 or more")
    match kind:
        case "striped":
            return Striped(kvp, block_tokens, start)
        case "growing":
            return Growing(
                kvp=kvp, block_tokens=block_tokens, limit_tokens=growth_limit_tokens, start=start, later=later
            )
        case "local":
            return Local(kvp, block_tokens, start)
    raise UserError(f"placement {kind!r} is not known: use one of {', '.join(PLACEMENTS)}, auto")
