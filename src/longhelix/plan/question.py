"""The question that a plan answers."""

import math
from dataclasses import dataclass

from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.plan.demand import Demand
from longhelix.plan.service import CHUNKS

MOST_GPUS = 1024
LEAST_CHUNK = 256  # tokens; matrix products over fewer rows are bound by reading the weights


@dataclass(frozen=True)
class Question:
    """A model on a system, its requests, and targets that must all be met at the same time."""

    setting: Setting
    context: int  # tokens of the longest request
    max_gpus: int
    ttl_s: float | None = None  # maximum mean time between tokens of a request (TPOT)
    ttl_with_prefill_s: float | None = None  # maximum time between tokens in a step that also computes a chunk
    ttft_s: float | None = None  # maximum time to first token
    users: int = 1  # minimum number of requests that run at the same time
    fewest_gpus: bool = False  # minimise GPUs instead of maximising tokens/s/GPU
    demand: Demand | None = None  # lengths and rate of requests; None for requests that never end
    gpu_hour: float | None = None  # price of one GPU per hour, in any currency
    any_shape: bool = False  # also allow numbers of GPUs and degrees that are unusual for clusters and engines

    @property
    def has_targets(self) -> bool:
        return (
            self.users > 1
            or self.fewest_gpus
            or any(target is not None for target in (self.ttl_s, self.ttl_with_prefill_s, self.ttft_s, self.rate_per_s))
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunk sizes to choose from, in tokens, ascending.

        Small chunks make prefill slow. They are worth it only to limit the time of steps with a chunk.
        """
        return CHUNKS if self.ttl_with_prefill_s is not None else tuple(each for each in CHUNKS if each >= LEAST_CHUNK)

    @property
    def node_gpus(self) -> int | None:
        """GPUs per server, which limits the shapes of layouts; None if any shape is allowed."""
        return None if self.any_shape else self.setting.system.network.node_ranks

    @property
    def rate_per_s(self) -> float | None:
        return None if self.demand is None else self.demand.rate_per_s

    def __post_init__(self) -> None:
        most = self.setting.system.network.scale_out.ranks
        for name, value in (("context", self.context), ("max-gpus", self.max_gpus), ("users", self.users)):
            if value < 1:
                raise UserError(f"{name} is {value}: set it to 1 or more")
        if self.max_gpus > min(MOST_GPUS, most):
            raise UserError(f"max-gpus is {self.max_gpus}: set it to {min(MOST_GPUS, most)} or less")
        targets = ("ttl", self.ttl_s), ("ttl-with-prefill", self.ttl_with_prefill_s), ("ttft", self.ttft_s)
        for name, seconds in targets:
            if seconds is not None and seconds <= 0:
                raise UserError(f"{name} is {seconds} s: set it above 0")
        if self.users > 1 and self.rate_per_s is not None:
            raise UserError("the number of users follows from the rate: leave out --users or --rate")
        if self.gpu_hour is not None and not (math.isfinite(self.gpu_hour) and self.gpu_hour > 0):
            raise UserError(f"gpu-hour is {self.gpu_hour}: set it above 0")
