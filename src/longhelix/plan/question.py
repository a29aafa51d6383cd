"""What a user asks a planner."""

from dataclasses import dataclass

from longhelix.errors import UserError
from longhelix.perf.setting import Setting


@dataclass(frozen=True)
class Question:
    """A model on a system, requests of `context` tokens, and what is wanted of them.

    ttl_s: the most seconds from token to token; ttft_s: to the first token; users: at least so many requests at a
    time. fewest_gpus: of what meets the targets the fewest GPUs, in place of the most tokens/s/GPU.
    """

    setting: Setting
    context: int
    max_gpus: int
    ttl_s: float | None = None
    ttft_s: float | None = None
    users: int = 1
    fewest_gpus: bool = False

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


MOST_GPUS = 1024
