"""What a user asks a planner."""

import math
from dataclasses import dataclass

from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.plan.demand import Demand


@dataclass(frozen=True)
class Question:
    """A model on a system, requests of `context` tokens, and what is wanted of them, all at the same time.

    ttl_s: the most seconds from token to token, while a prompt runs beside as well; ttft_s: to the first token; users:
    at least so many requests at a time. fewest_gpus: of what meets the targets the fewest GPUs, in place of the most
    tokens/s/GPU. demand: how long requests are and how many come; None: they are there for ever. gpu_hour: the price of
    a GPU for an hour, in any currency. any_shape: of GPUs and degrees, those that no cluster has and no engine takes
    among them.
    """

    setting: Setting
    context: int
    max_gpus: int
    ttl_s: float | None = None
    ttft_s: float | None = None
    users: int = 1
    fewest_gpus: bool = False
    demand: Demand | None = None
    gpu_hour: float | None = None
    any_shape: bool = False

    @property
    def has_targets(self) -> bool:
        return (
            self.users > 1
            or self.fewest_gpus
            or any(target is not None for target in (self.ttl_s, self.ttft_s, self.rate_per_s))
        )

    @property
    def node_gpus(self) -> int | None:
        """Of a server, whose shapes layouts have; None: they may have any."""
        return None if self.any_shape else self.setting.system.node_ranks

    @property
    def rate_per_s(self) -> float | None:
        return None if self.demand is None else self.demand.rate_per_s

    def __post_init__(self) -> None:
        most = self.setting.system.scale_out.ranks
        for name, value in (("context", self.context), ("max-gpus", self.max_gpus), ("users", self.users)):
            if value < 1:
                raise UserError(f"{name} is {value}: set it to 1 or more")
        if self.max_gpus > min(MOST_GPUS, most):
            raise UserError(f"max-gpus is {self.max_gpus}: set it to {min(MOST_GPUS, most)} or less")
        for name, seconds in (("ttl", self.ttl_s), ("ttft", self.ttft_s)):
            if seconds is not None and seconds <= 0:
                raise UserError(f"{name} is {seconds} s: set it above 0")
        if self.users > 1 and self.rate_per_s is not None:
            raise UserError("how many users there are follows from the rate: leave out --users or --rate")
        if self.gpu_hour is not None and not (math.isfinite(self.gpu_hour) and self.gpu_hour > 0):
            raise UserError(f"gpu-hour is {self.gpu_hour}: set it above 0")


MOST_GPUS = 1024
