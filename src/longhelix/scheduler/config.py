"""The settings of the scheduler."""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from longhelix.errors import UserError
from longhelix.scheduler.kv.placement import Placement, make_placement, placement_by_length
from longhelix.scheduler.kv.windows import KVWindow, span_blocks
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec.attention import Visibility
from longhelix.values import above_zero, flag, one_of, seconds, weight, whole

_MANY_BLOCKS = 2**18  # their ids take some 50 MB
DEFAULT_TBT_S = 0.08  # between tokens, where nobody asked for a time


@dataclass(frozen=True)
class SchedulerConfig:
    """`num_blocks` is each KVP rank's pool, `chunk_tokens` the most prompt tokens of one step over all requests.
    windows: the groups of layers whose rows see only some tokens, each with pools of its own; `num_blocks` is then that
    of the other layers.

    policy: which request goes first. adaptive: a step has as many prompt tokens as it can compute within
    `tbt_target_s`, or, where that is None, within 80 ms or twice what its decodes take alone. slo_scale: the deadline
    of a request that has none of its own, in predicted prefills of it alone, but at least 1 s. client_weights: of
    clients' shares, where they are not 1. prefix_cache: requests share KV blocks with what has run before;
    swap_blocks: of those whose room is needed, each KVP rank keeps so many elsewhere.

    growth_limit_tokens: what a KVP rank has of a growing request before the next one joins; None: each request's time
    between tokens decides, and never more than an even share of `max_model_len`.
    placement: that of all requests, or "auto": chosen for each request by its length (`placement_by_length`), growing
    by `kvp_threshold_tokens` a rank. batch_invariant: every request that may spread begins on rank 0, because merges
    add up in the order of the ranks. pp: pipeline stages, each of which has such pools. own_clocks: KVP ranks, each
    with a copy of the FFN, step by themselves where they share no request.
    """

    kvp: int
    num_blocks: int
    max_model_len: int
    block_tokens: int = 16
    chunk_tokens: int = 512
    max_running: int = 64
    placement: str = "striped"
    growth_limit_tokens: int | None = 4096
    kvp_threshold_tokens: int = 0
    batch_invariant: bool = False
    policy: str = "fcfs"
    adaptive: bool = False
    tbt_target_s: float | None = None
    slo_scale: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    prefix_cache: bool = False
    swap_blocks: int = 0
    pp: int = 1
    own_clocks: bool = False
    windows: tuple[KVWindow, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_tokens", "chunk_tokens", "max_running", "pp"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, MOST_TOKENS))
        if self.growth_limit_tokens is not None:
            limit_tokens = whole("growth_limit_tokens", self.growth_limit_tokens, 0, MOST_TOKENS)
            object.__setattr__(self, "growth_limit_tokens", limit_tokens)
        for name in ("kvp_threshold_tokens", "swap_blocks"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 0, MOST_TOKENS))
        for name in ("batch_invariant", "adaptive", "prefix_cache", "own_clocks"):
            flag(name, getattr(self, name))
        if self.swap_blocks and not self.prefix_cache:
            raise UserError(
                "swap_tokens needs the prefix cache, which finds swapped KV: set prefix_cache to True, or leave "
                "swap_tokens out"
            )
        if self.own_clocks and self.pp > 1:
            raise UserError(f"own_clocks needs a single pipeline stage, but pp is {self.pp}: set pp to 1")
        one_of("policy", self.policy, POLICIES)
        if self.tbt_target_s is not None:
            object.__setattr__(self, "tbt_target_s", seconds("tbt_target", self.tbt_target_s))
        object.__setattr__(self, "slo_scale", above_zero("slo_scale", self.slo_scale))
        weights = {name: weight(f"the weight of client {name!r}", each) for name, each in self.client_weights.items()}
        object.__setattr__(self, "client_weights", weights)
        self.place(1, 1, start=0)  # refuses a placement that cannot be

    @property
    def clocks(self) -> int:
        """Into how many parts the ranks fall that may be in different steps."""
        return self.kvp if self.own_clocks else 1

    def with_pools(self, num_blocks: int, windows: tuple[KVWindow, ...] = ()) -> "SchedulerConfig":
        """The same with pools of so many KV blocks. No rank is meant to have more of a request than its pool holds, so
        that whoever fits into all pools together is not refused."""
        tokens, limit = num_blocks * self.block_tokens, self.growth_limit_tokens
        return replace(
            self,
            num_blocks=num_blocks,
            growth_limit_tokens=None if limit is None else min(limit, tokens),
            kvp_threshold_tokens=min(self.kvp_threshold_tokens, tokens),
            windows=windows,
        )

    def placement_of(self, prompt_tokens: int, capacity_tokens: int, limit_tokens: int | None = None) -> str:
        """The name of the placement of a request of these lengths. limit_tokens: see `place`."""
        if self.placement != "auto":
            return self.placement
        if limit_tokens is not None:
            return "growing"
        return placement_by_length(prompt_tokens, capacity_tokens, self.kvp_threshold_tokens)

    def place(
        self,
        prompt_tokens: int,
        capacity_tokens: int,
        start: int,
        later: tuple[int, ...] = (),
        limit_tokens: int | None = None,
    ) -> Placement:
        """A request's placement, beginning on KVP rank `start`. later: see `Growing`. limit_tokens: its own growth
        limit, if it has one."""
        name = self.placement_of(prompt_tokens, capacity_tokens, limit_tokens)
        if limit_tokens is None:
            limit_tokens = self.growth_limit_tokens
            if self.placement == "auto":
                limit_tokens = max(self.kvp_threshold_tokens // self.block_tokens, 1) * self.block_tokens
            elif limit_tokens is None:
                limit_tokens = self.share_tokens
        return make_placement(name, self.kvp, self.block_tokens, limit_tokens, start, later)

    def windows_of(
        self, visibilities: Iterable[Visibility], num_blocks: int, *, with_ends: bool = True
    ) -> tuple[KVWindow, ...]:
        """Return the pool sizes of the layers whose rows see only some tokens.

        A pool has room for the windows of all running requests and for the chunks of one step. It is never larger than
        the pool of the other layers.

        Args:
            num_blocks: size of the pool of the other layers, in KV blocks of each rank.
            with_ends: whether the pool also has room for the windows of as many finished requests, if there is a
                prefix cache.
        """
        ends = self.max_running * (2 if self.prefix_cache and with_ends else 1)
        return tuple(
            KVWindow(
                one,
                num_blocks=min(ends * self._span_blocks(one) + self.most_chunk_blocks, num_blocks),
                num_slots=self.swap_blocks,
            )
            for one in visibilities
        )

    @property
    def window_tokens(self) -> list[int]:
        """The most tokens of a request that decodes which a rank keeps in each group with a limit, in whole blocks."""
        return [self.block_tokens * self._span_blocks(window.visibility) for window in self.windows]

    def _span_blocks(self, visibility: Visibility) -> int:
        """The most blocks of a rank that a request needs at once in a group."""
        blocks = span_blocks(visibility, self.block_tokens)
        return -(-blocks // self.kvp) if self.placement == "striped" else blocks

    @property
    def most_listed_blocks(self) -> int:
        """KV blocks on each KVP rank that are enough for all running requests and as many ended ones of the longest
        length, or for two of these, or for some million tokens. For models all of whose layers have limits: the blocks
        of others then take no memory but that of their ids."""
        longest = -(-self.longest_local_tokens // self.block_tokens)
        return min(2 * self.max_running * longest, max(_MANY_BLOCKS, 2 * longest))

    @property
    def most_chunk_blocks(self) -> int:
        """The most new KV blocks of one rank that the chunks of a step may need, but for those that are begun."""
        blocks = -(-self.chunk_tokens // self.block_tokens)
        return -(-blocks // self.kvp) if self.placement == "striped" else blocks

    @property
    def share_tokens(self) -> int:
        """A KVP rank's even share of the longest request, in whole KV blocks."""
        return -(-self.max_model_len // (self.kvp * self.block_tokens)) * self.block_tokens

    @property
    def longest_local_tokens(self) -> int:
        """The most tokens of one request that one KVP rank may have to hold."""
        longest, short = self.max_model_len, min(self.kvp_threshold_tokens, self.max_model_len)
        requests = [(1, longest), (longest, longest), (min(1, short), short)]
        places = [(self.place(prompt, capacity, start=0), capacity) for prompt, capacity in requests]
        return max(place.local_length(rank, capacity) for place, capacity in places for rank in range(self.kvp))

    @property
    def most_blocks(self) -> int:
        """The most KV blocks that one request may have on one KVP rank."""
        return min(self.num_blocks, -(-self.longest_local_tokens // self.block_tokens))

    @property
    def longest_request_tokens(self) -> int:
        """The most tokens, prompt and new ones, that every request may have: max_model_len, or what the pools hold."""
        pool_tokens = self.num_blocks * self.block_tokens

        def exceeds(capacity_tokens: int) -> bool:
            place = self.place(1, capacity_tokens, start=0)
            # The last token is never written.
            return any(place.local_length(rank, capacity_tokens - 1) > pool_tokens for rank in range(self.kvp))

        return bisect.bisect_left(range(1, self.max_model_len + 1), True, key=exceeds)
