"""What a loop and its scheduler told each other: enough to go through all of it again."""

from collections.abc import Sequence
from typing import NamedTuple

from longhelix.scheduler.request import Request
from longhelix.scheduler.step import Step, StepResult


class Added(NamedTuple):
    """A request was queued. hashes: see `Scheduler.add`."""

    request: Request
    hashes: Sequence[bytes] = ()


class Aborted(NamedTuple):
    """A request was ended from outside."""

    request_id: int


class Scheduled(NamedTuple):
    """The scheduler was asked for a step, at `now_s` of the loop's clock. None: there was nothing to run."""

    now_s: float
    step: Step | None


class Completed(NamedTuple):
    """A step came back."""

    result: StepResult


Event = Added | Aborted | Scheduled | Completed
