"""Growth limits: how many tokens of a growing request a KVP rank has before the next one joins."""

from functools import lru_cache

from longhelix.errors import UserError
from longhelix.scheduler.config import DEFAULT_TBT_S, SchedulerConfig
from longhelix.scheduler.request import Request
from longhelix.scheduler.work import Cost, Work

# Of the time between two tokens what a request's own decode may take on its ranks; the rest is for what runs beside it.
_SHARE = 0.5


def limit_within(cost: Cost, kvp: int, block_tokens: int, most_tokens: int, seconds: float) -> int:
    """The most tokens on one rank, whole KV blocks, whose decode alone takes at most `seconds`; at least one block, and
    at most `most_tokens`, which are whole blocks.

    Costs spread KV evenly: S tokens on one rank are as much attention as KVP * S over all of them.
    """
    low, high = 1, most_tokens // block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = cost.seconds(Work.decode(1, kvp * middle * block_tokens)) <= seconds
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * block_tokens


class GrowthLimits:
    """The limit that a request names; else the engine's, or, where that is left to the cost, the one that keeps its own
    decode within half of its time between tokens: `tbt_slo_s`, the engine's target, or 80 ms."""

    def __init__(self, config: SchedulerConfig, cost: Cost | None) -> None:
        self._config = config
        self._cost = cost
        self._within = lru_cache(maxsize=1024)(self._derived)

    def of(self, request: Request) -> int | None:
        """A request's own limit in tokens, whole KV blocks. None: it has none beside that of its placement."""
        config, named = self._config, request.service.growth_limit_tokens
        if named is not None:
            return named // config.block_tokens * config.block_tokens
        if config.growth_limit_tokens is not None or config.placement != "growing":
            return None
        return self._within(request.service.tbt_slo_s or config.tbt_target_s or DEFAULT_TBT_S)

    def check(self, request: Request) -> None:
        """Raise UserError for a limit under which a request could not run."""
        config, named = self._config, request.service.growth_limit_tokens
        if named is None:
            return
        if config.placement not in ("growing", "auto"):
            raise UserError(
                f"growth_limit_tokens is {named}, but the placement is {config.placement}: set --placement to growing "
                "or auto, or leave it out"
            )
        if named < config.block_tokens:
            raise UserError(
                f"growth_limit_tokens is {named}, which is less than a KV block: set it to at least "
                f"{config.block_tokens}"
            )
        limit_tokens, held_tokens = named // config.block_tokens * config.block_tokens, request.num_rows
        if limit_tokens * config.kvp < held_tokens:
            share_blocks = -(-held_tokens // (config.kvp * config.block_tokens))
            raise UserError(
                f"growth_limit_tokens is {named}, so all KVP ranks together hold {limit_tokens * config.kvp} tokens, "
                f"but the request may have {held_tokens}: set it to at least {share_blocks * config.block_tokens}"
            )
        most_tokens = -(-config.longest_local_tokens // config.block_tokens) * config.block_tokens
        if min(limit_tokens, held_tokens) > most_tokens:
            raise UserError(
                f"growth_limit_tokens is {named}, but each rank is set up for at most {most_tokens} tokens of a "
                f"request: set it to at most {most_tokens}, or raise --growth-limit-tokens"
            )

    def _derived(self, tbt_s: float) -> int:
        config = self._config
        assert self._cost is not None
        most_tokens = min(config.share_tokens, config.num_blocks * config.block_tokens)
        return limit_within(self._cost, config.kvp, config.block_tokens, most_tokens, _SHARE * tbt_s)
