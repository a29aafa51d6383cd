"""Growth limits: the tokens of a growing request on a KVP rank before the next rank joins."""

from functools import lru_cache

from longhelix.errors import UserError
from longhelix.scheduler.config import DEFAULT_TBT_S, SchedulerConfig
from longhelix.scheduler.request import Request
from longhelix.scheduler.work import Cost, Work

# Share of the time between two tokens that a request's own decode may take. The rest is for other requests.
_SHARE = 0.5


def limit_within(cost: Cost, kvp: int, block_tokens: int, most_tokens: int, seconds: float) -> int:
    """Return the most tokens on one rank, in whole KV blocks, whose decode alone takes at most `seconds`.

    At least one block, and at most `most_tokens`. A cost assumes evenly spread KV, so S tokens on one rank are as much
    attention as KVP * S over all ranks.
    """
    low, high = 1, most_tokens // block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = cost.seconds(Work.decode(1, kvp * middle * block_tokens)) <= seconds
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * block_tokens


class GrowthLimits:
    """Chooses the growth limit of requests: their own, or the engine's. If the engine has none, a request's own decode
    may take half of its time between tokens: `tbt_slo_s`, the engine's target, or 80 ms."""

    def __init__(self, config: SchedulerConfig, cost: Cost | None) -> None:
        self._config = config
        self._cost = cost
        self._within = lru_cache(maxsize=1024)(self._derived)

    def of(self, request: Request) -> int | None:
        """Return a request's limit in tokens, in whole KV blocks. None if the limit of its placement applies."""
        config, named = self._config, request.service.growth_limit_tokens
        if named is not None:
            return named // config.block_tokens * config.block_tokens
        if config.placement.growth_limit_tokens is not None or config.placement.name != "growing":
            return None
        return self._within(request.service.tbt_slo_s or config.service.tbt_target_s or DEFAULT_TBT_S)

    def check(self, request: Request) -> None:
        """Raise UserError if a request could not run with its limit."""
        config, named = self._config, request.service.growth_limit_tokens
        if named is None:
            return
        if config.placement.name not in ("growing", "auto"):
            raise UserError(
                f"growth_limit_tokens is {named}, but the placement is {config.placement.name}: set --placement to "
                "growing "
                "or auto, or leave it out"
            )
        if named < config.block_tokens:
            raise UserError(
                f"growth_limit_tokens is {named}, which is less than a KV block: set it to at least "
                f"{config.block_tokens}"
            )
        limit_tokens, request_tokens = named // config.block_tokens * config.block_tokens, request.num_rows
        if limit_tokens * config.kvp < request_tokens:
            share_blocks = -(-request_tokens // (config.kvp * config.block_tokens))
            raise UserError(
                f"growth_limit_tokens is {named}, so all KVP ranks together hold {limit_tokens * config.kvp} tokens, "
                f"but the request may have {request_tokens}: set it to at least {share_blocks * config.block_tokens}"
            )
        most_tokens = -(-config.longest_local_tokens // config.block_tokens) * config.block_tokens
        if min(limit_tokens, request_tokens) > most_tokens:
            raise UserError(
                f"growth_limit_tokens is {named}, but each rank is set up for at most {most_tokens} tokens of a "
                f"request: set it to at most {most_tokens}, or raise --growth-limit-tokens"
            )

    def _derived(self, tbt_s: float) -> int:
        config = self._config
        assert self._cost is not None
        most_tokens = min(config.share_tokens, config.num_blocks * config.block_tokens)
        return limit_within(self._cost, config.kvp, config.block_tokens, most_tokens, _SHARE * tbt_s)
