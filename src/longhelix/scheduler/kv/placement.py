"""Placements: which KVP rank owns each KV block of a request.

Every placement is a list of owners; the closed forms below say the same without the list. All are exact, because
attention over a set of keys may be split over any partition of that set (docs/internals/attention.md).
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
    """Of blocks in a row, the `num` ones at `places` that `rank` owns."""

    rank: int
    num: int
    places: slice

    def behind(self, more: int) -> "Share":
        """The same where `more` blocks come first."""
        start, stop, step = self.places.start, self.places.stop, self.places.step
        return self._replace(places=slice(start + more, stop + more, step))


class Placement(Protocol):
    """How one request's KV blocks spread over the KVP ranks of an attention group, from rank `start` on.

    name: in PLACEMENTS. spread: they go to all ranks at once, so that all take part in the request from its first row
    on. home: the rank that alone takes part in it at first; None if several do. even: all ranks have the same share of
    its tokens, to within a KV block. alone_tokens: one rank has all of its first tokens, up to so many.
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
        """The KVP ranks in the order in which they are taken, from `start` on."""
        ...

    def next_owner(self, last: int, count: int) -> int:
        """The KVP rank of the next block after `count` blocks, of which `last` owns the last one. Without blocks it is
        `start`. With another `last`, all blocks that follow move on by as many ranks of `order`."""
        ...

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        """Of the next `num` blocks those of each KVP rank, which may have several shares, in order: as if `next_owner`
        were asked for one after the other."""
        ...

    def owner(self, position: int) -> int:
        """Closed form: the KVP rank that keeps the token at `position`."""
        ...

    def local_length(self, rank: int, length: int) -> int:
        """Closed form: how many of the request's first `length` tokens `rank` keeps."""
        ...


def striped_length(block_tokens: int, kvp: int, turn: int, length: int) -> int:
    """How many of `length` tokens fall to the rank whose turn is `turn`, when blocks go round `kvp` ranks."""
    round_tokens = block_tokens * kvp
    full_rounds, rest = divmod(length, round_tokens)
    return full_rounds * block_tokens + min(max(rest - turn * block_tokens, 0), block_tokens)


@lru_cache
def in_turn(kvp: int, start: int) -> tuple[int, ...]:
    """All ranks, each after the one before it, from `start` on."""
    return (*range(start, kvp), *range(start))


@lru_cache
def _stripes(order: tuple[int, ...], first: int, start: int, stop: int) -> tuple[Share, ...]:
    """Of `stop` blocks those from `start` on, which go round the ranks in an order, from rank `first` on."""
    kvp, turn = len(order), order.index(first)
    places = [slice(place, stop, kvp) for place in range(start, min(start + kvp, stop))]
    return tuple(Share(order[(turn + at) % kvp], len(range(stop)[each]), each) for at, each in enumerate(places))


@dataclass(frozen=True)
class Striped:
    """Round robin by block from a start rank of the request's own (Helix's staggered KV, section 2.3)."""

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
    """One rank until it holds `limit_tokens`, then one more (Medha's dynamic KVP); striped once all are full.

    `limit_tokens` is a multiple of the block. later: the other ranks in the order in which they are taken; without
    them, those that follow `start`.
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

    def swapped(self, one: int, other: int) -> "Growing":
        """Two of the later ranks change places."""
        places = {one: other, other: one}
        return replace(self, later=tuple(places.get(rank, rank) for rank in self.order[1:]))

    def openings(self, first: int, stop: int) -> range:
        """Which of the blocks with an index from `first` to `stop` are a later rank's first ones."""
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
        growing, found = min(num, self.kvp * limit_blocks - count), list[Share]()
        start = 0
        while start < growing:
            last = self.next_owner(last, count + start)
            stop = min(start + limit_blocks - (count + start) % limit_blocks, growing)
            found.append(Share(last, stop - start, slice(start, stop)))
            start = stop
        return [*found, *_stripes(self.order, self.next_owner(last, count + start), start, num)]

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

    blocks_by_owner: how many of the blocks each KVP rank has. last: the rank that has the last one.
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
        """How many ranks of the order lie between the next owner and the one that `base` would choose without these
        blocks."""
        base, order = self.base, self.order
        return order.index(base.next_owner(self.last, self.num_blocks)) - order.index(
            base.owner(self.num_blocks * self.block_tokens)
        )

    def _turned(self, rank: int, turn: int) -> int:
        """The rank that is `turn` places further on in the order."""
        return self.order[(self.order.index(rank) + turn) % self.kvp]

    def owner(self, position: int) -> int:
        """The KVP rank that keeps the token at `position`, which is behind the blocks."""
        return self._turned(self.base.owner(position), self._turn)

    def local_length(self, rank: int, length: int) -> int:
        """How many of the first `length` tokens, at least those of the blocks, `rank` keeps."""
        turned = self._turned(rank, -self._turn)
        there = self.num_blocks * self.block_tokens
        added = self.base.local_length(turned, length) - self.base.local_length(turned, there)
        return self.blocks_by_owner[rank] * self.block_tokens + added


@dataclass(frozen=True)
class Continued:
    """The placement `base`, going on after blocks that are there already.

    owners: those of the blocks, at least one, in position order. Another request may have placed them, by another
    placement or from another rank on.
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
        """How many tokens the blocks with `owners` hold when all of them are full."""
        return len(self.owners) * self.block_tokens

    def follows(self, placement: Placement) -> bool:
        """Whether `placement` would have put the blocks where they are."""
        return all(placement.owner(index * self.block_tokens) == owner for index, owner in enumerate(self.owners))

    @cached_property
    def blocks_by_owner(self) -> Counter[int]:
        """How many of the blocks each KVP rank has."""
        return Counter(self.owners)

    @cached_property
    def _behind(self) -> Behind:
        return Behind(self.base, self.blocks_by_owner, self.owners[-1])

    def next_owner(self, last: int, count: int) -> int:
        return self.owners[count] if count < len(self.owners) else self.base.next_owner(last, count)

    def shares(self, last: int, count: int, num: int) -> Sequence[Share]:
        there = self.owners[count : count + num]
        if not there:
            return self.base.shares(last, count, num)
        found = [Share(owner, 1, slice(place, place + 1)) for place, owner in enumerate(there)]
        if len(there) == num:
            return found
        behind = self.base.shares(there[-1], count + len(there), num - len(there))
        return [*found, *(share.behind(len(there)) for share in behind)]

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
    """Blocks on each KVP rank for the first tokens of a request."""
    return [-(-placement.local_length(rank, tokens) // placement.block_tokens) for rank in range(placement.kvp)]


PLACEMENTS = ("striped", "growing", "local")


def placement_by_length(prompt_tokens: int, capacity_tokens: int, threshold_tokens: int) -> str:
    """The name of the placement for a request of these lengths: local where all of it stays within the threshold,
    growing where its answer may exceed it, striped where its prompt does. What runs beside it has no influence."""
    if capacity_tokens <= threshold_tokens:
        return "local"
    return "growing" if prompt_tokens <= threshold_tokens else "striped"


def make_placement(
    kind: str, kvp: int, block_tokens: int, growth_limit_tokens: int, start: int, later: tuple[int, ...] = ()
) -> Placement:
    """The placement of one request, by name. Raises UserError for a name that is none of PLACEMENTS."""
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
