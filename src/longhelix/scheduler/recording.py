"""Events between a loop and its scheduler, which suffice to replay all steps."""

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
    """The scheduler made a step at `now_s` on the loop's clock. step: None if there was nothing to run."""

    now_s: float
    step: Step | None


class Completed(NamedTuple):
    """The result of a step came back."""

    result: StepResult


Event = Added | Aborted | Scheduled | Completed
