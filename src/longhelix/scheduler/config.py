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

_MANY_BLOCKS = 2**18  # whose ids take about 50 MB
DEFAULT_TBT_S = 0.08  # target time between tokens, if neither the engine nor the request has one


def _set_whole(config: object, names: Iterable[str], least: int) -> None:
    """Check that fields are integers from `least` on, and store them as plain ones. Raises UserError."""
    for name in names:
        object.__setattr__(config, name, whole(name, getattr(config, name), least, MOST_TOKENS))


def _check_flags(config: object, names: Iterable[str]) -> None:
    for name in names:
        flag(name, getattr(config, name))


@dataclass(frozen=True)
class StepConfig:
    """What steps may hold, and which ranks run one at the same time.

    Attributes:
        chunk_tokens: The most prompt tokens of one step over all requests.
        adaptive: A step has as many prompt tokens as it can compute within the target time between tokens. If there is
            none, within 80 ms or twice the time of its decodes alone.
        max_running: The most running requests.
        pp: Pipeline stages. Each has pools of its own.
        own_clocks: KVP ranks with a copy of the FFN each step by themselves unless they share a request.
    """

    chunk_tokens: int = 512
    adaptive: bool = False
    max_running: int = 64
    pp: int = 1
    own_clocks: bool = False

    def __post_init__(self) -> None:
        _set_whole(self, ("chunk_tokens", "max_running", "pp"), least=1)
        _check_flags(self, ("adaptive", "own_clocks"))
        if self.own_clocks and self.pp > 1:
            raise UserError(f"own_clocks needs a single pipeline stage, but pp is {self.pp}: set pp to 1")


@dataclass(frozen=True)
class PlacementConfig:
    """Which KVP ranks hold the KV of a request.

    Attributes:
        name: The placement of all requests, or "auto", which chooses one for each request by its length
            (`placement_by_length`), growing by `kvp_threshold_tokens` per rank.
        growth_limit_tokens: Tokens of a growing request on a KVP rank before the next rank joins. None: each request's
            time between tokens decides, up to an even share of the longest request.
        kvp_threshold_tokens: Tokens of the longest request that "auto" places on one rank.
        batch_invariant: Requests that may spread begin on rank 0, because merges add up in the order of the ranks.
    """

    name: str = "striped"
    growth_limit_tokens: int | None = 4096
    kvp_threshold_tokens: int = 0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.growth_limit_tokens is not None:
            _set_whole(self, ("growth_limit_tokens",), least=0)
        _set_whole(self, ("kvp_threshold_tokens",), least=0)
        _check_flags(self, ("batch_invariant",))


@dataclass(frozen=True)
class ServiceConfig:
    """Which requests go first, and how fast they should be.

    Attributes:
        policy: Which request goes first.
        tbt_target_s: Target time between tokens in seconds. None: there is none.
        slo_scale: The deadline of a request without its own, in predicted prefills of the request alone, but at least
            1 s.
        client_weights: Weights of clients' shares, if they are not 1.
    """

    policy: str = "fcfs"
    tbt_target_s: float | None = None
    slo_scale: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("policy", self.policy, POLICIES)
        if self.tbt_target_s is not None:
            object.__setattr__(self, "tbt_target_s", seconds("tbt_target", self.tbt_target_s))
        object.__setattr__(self, "slo_scale", above_zero("slo_scale", self.slo_scale))
        weights = {name: weight(f"the weight of client {name!r}", share) for name, share in self.client_weights.items()}
        object.__setattr__(self, "client_weights", weights)


@dataclass(frozen=True)
class CacheConfig:
    """Settings of the KV cache, except for the pools of layers that attend to all tokens.

    Attributes:
        prefix_cache: Requests share KV blocks with earlier ones.
        swap_blocks: Evicted blocks that each KVP rank keeps outside of its pool.
        windows: The groups of layers whose rows see only some tokens. Each group has its own pools.
    """

    prefix_cache: bool = False
    swap_blocks: int = 0
    windows: tuple[KVWindow, ...] = ()

    def __post_init__(self) -> None:
        _set_whole(self, ("swap_blocks",), least=0)
        _check_flags(self, ("prefix_cache",))
        if self.swap_blocks and not self.prefix_cache:
            raise UserError(
                "swap_tokens needs the prefix cache, which finds swapped KV: set prefix_cache to True, or leave "
                "swap_tokens out"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """The settings of the scheduler.

    Attributes:
        kvp: Number of KVP ranks.
        num_blocks: KV blocks in each KVP rank's pool, for layers whose rows see everything.
        max_model_len: The most tokens of a request, prompt and answer.
        block_tokens: Tokens of a KV block.
        steps: What steps may hold, and which ranks run one at the same time.
        placement: Which KVP ranks hold the KV of a request.
        service: Which requests go first, and how fast they should be.
        cache: Other settings of the KV cache.
    """

    kvp: int
    num_blocks: int
    max_model_len: int
    block_tokens: int = 16
    steps: StepConfig = StepConfig()
    placement: PlacementConfig = PlacementConfig()
    service: ServiceConfig = field(default_factory=ServiceConfig)
    cache: CacheConfig = CacheConfig()

    def __post_init__(self) -> None:
        _set_whole(self, ("num_blocks", "max_model_len", "block_tokens"), least=1)
        self.place(1, 1, start=0)  # rejects an impossible placement

    @property
    def clocks(self) -> int:
        """Number of groups of ranks that may be in different steps."""
        return self.kvp if self.steps.own_clocks else 1

    def with_pools(self, num_blocks: int, windows: tuple[KVWindow, ...] = ()) -> "SchedulerConfig":
        """Return the settings with pools of `num_blocks` KV blocks.

        Limits are lowered to the size of a pool, so that a request that fits into all pools together is not rejected.
        """
        tokens, limit = num_blocks * self.block_tokens, self.placement.growth_limit_tokens
        placement = replace(
            self.placement,
            growth_limit_tokens=None if limit is None else min(limit, tokens),
            kvp_threshold_tokens=min(self.placement.kvp_threshold_tokens, tokens),
        )
        return replace(self, num_blocks=num_blocks, placement=placement, cache=replace(self.cache, windows=windows))

    def placement_of(self, prompt_tokens: int, capacity_tokens: int, limit_tokens: int | None = None) -> str:
        """Return the name of the placement of a request of these lengths. limit_tokens: see `place`."""
        if self.placement.name != "auto":
            return self.placement.name
        if limit_tokens is not None:
            return "growing"
        return placement_by_length(prompt_tokens, capacity_tokens, self.placement.kvp_threshold_tokens)

    def place(
        self,
        prompt_tokens: int,
        capacity_tokens: int,
        start: int,
        later: tuple[int, ...] = (),
        limit_tokens: int | None = None,
    ) -> Placement:
        """Return a request's placement that begins on KVP rank `start`.

        Args:
            prompt_tokens: Tokens of its prompt.
            capacity_tokens: The most tokens of its prompt and its answer.
            start: The first KVP rank.
            later: See `Growing`.
            limit_tokens: Its own growth limit, if it has one.
        """
        name = self.placement_of(prompt_tokens, capacity_tokens, limit_tokens)
        if limit_tokens is None:
            limit_tokens = self.placement.growth_limit_tokens
            if self.placement.name == "auto":
                limit_tokens = max(self.placement.kvp_threshold_tokens // self.block_tokens, 1) * self.block_tokens
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
            visibilities: What the rows of each group see.
            num_blocks: Size of the pool of the other layers, in KV blocks of each rank.
            with_ends: Whether the pool also has room for the windows of as many finished requests, if there is a
                prefix cache.
        """
        ends = self.steps.max_running * (2 if self.cache.prefix_cache and with_ends else 1)
        return tuple(
            KVWindow(
                visibility,
                num_blocks=min(ends * self._span_blocks(visibility) + self.most_chunk_blocks, num_blocks),
                num_slots=self.cache.swap_blocks,
            )
            for visibility in visibilities
        )

    @property
    def window_tokens(self) -> list[int]:
        """The most tokens of a decoding request that a rank keeps in each group with a limit, in whole blocks."""
        return [self.block_tokens * self._span_blocks(window.visibility) for window in self.cache.windows]

    def _span_blocks(self, visibility: Visibility) -> int:
        """Return the most blocks of a rank that a request needs at once in a group."""
        blocks = span_blocks(visibility, self.block_tokens)
        return -(-blocks // self.kvp) if self.placement.name == "striped" else blocks

    @property
    def most_listed_blocks(self) -> int:
        """Number of KV blocks of a KVP rank for models in which all layers have limits.

        Other layers' blocks then take only the memory of their ids. The number suffices for all running requests of the
        longest length and as many ended ones. It is capped at some million tokens, or two such requests.
        """
        longest = -(-self.longest_local_tokens // self.block_tokens)
        return min(2 * self.steps.max_running * longest, max(_MANY_BLOCKS, 2 * longest))

    @property
    def most_chunk_blocks(self) -> int:
        """The most KV blocks of one rank that the chunks of a step may begin."""
        blocks = -(-self.steps.chunk_tokens // self.block_tokens)
        return -(-blocks // self.kvp) if self.placement.name == "striped" else blocks

    @property
    def share_tokens(self) -> int:
        """A KVP rank's even share of the longest request, in whole KV blocks."""
        return -(-self.max_model_len // (self.kvp * self.block_tokens)) * self.block_tokens

    @property
    def longest_local_tokens(self) -> int:
        """The most tokens of one request that one KVP rank may have to hold."""
        longest, short = self.max_model_len, min(self.placement.kvp_threshold_tokens, self.max_model_len)
        requests = [(1, longest), (longest, longest), (min(1, short), short)]
        places = [(self.place(prompt, capacity, start=0), capacity) for prompt, capacity in requests]
        return max(place.local_length(rank, capacity) for place, capacity in places for rank in range(self.kvp))

    @property
    def most_blocks(self) -> int:
        """The most KV blocks that one request may have on one KVP rank."""
        return min(self.num_blocks, -(-self.longest_local_tokens // self.block_tokens))

    @property
    def longest_request_tokens(self) -> int:
        """The most tokens, prompt and answer, that any request may have: max_model_len, or what the pools hold."""
        pool_tokens = self.num_blocks * self.block_tokens

        def exceeds(capacity_tokens: int) -> bool:
            place = self.place(1, capacity_tokens, start=0)
            # The last token is never written.
            return any(place.local_length(rank, capacity_tokens - 1) > pool_tokens for rank in range(self.kvp))

        return bisect.bisect_left(range(1, self.max_model_len + 1), True, key=exceeds)
