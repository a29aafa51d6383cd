"""Policies: which request goes next."""

from typing import Protocol

from longhelix.errors import UserError
from longhelix.scheduler.sequence import Job

# Of a request's time to its deadline: after so many of them it no longer waits for shorter ones.
_PATIENCE = 10.0
_MOST_SPARED = 0.4
# Of a request's prefill: so much later than another one it may be, to let that be done first. A bit above 1: of two
# equal ones the second is later by a whole prefill when the first is done.
_LATER = 1.1


class Policy(Protocol):
    """Decides which request is served first. It has no state, and is asked anew for each step.

    overtakes: whether a request that fits may be admitted before an earlier one that does not.
    """

    @property
    def overtakes(self) -> bool: ...

    def urgency(self, job: Job, left_s: float, now_s: float) -> float:
        """The request with the least goes first, of equal ones that which arrived first. left_s: what is left of its
        prefill, predicted."""
        ...

    def spared(self, job: Job, left_s: float, now_s: float) -> float:
        """The share of a step's time target that need not be used, where this request goes first; below 1."""
        ...

    def gives_way(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        """Whether a request lets another one be done before it that is less urgent, and sooner done."""
        ...


class FirstComeFirstServed:
    """In the order of arrival."""

    overtakes = False

    def urgency(self, job: Job, left_s: float, now_s: float) -> float:
        return job.request.arrival_s

    def spared(self, job: Job, left_s: float, now_s: float) -> float:
        return 0.0

    def gives_way(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        return False


class EarliestDeadlineFirst:
    """The request whose first token is due first."""

    overtakes = True

    def urgency(self, job: Job, left_s: float, now_s: float) -> float:
        return job.deadline_s

    def spared(self, job: Job, left_s: float, now_s: float) -> float:
        return 0.0

    def gives_way(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        return False


class ShortestRemainingFirst:
    """The request with the least left of its prefill. One that has waited ten times as long as its deadline allows goes
    before those that have not, so that none waits forever."""

    overtakes = True

    def urgency(self, job: Job, left_s: float, now_s: float) -> float:
        arrival_s = job.request.arrival_s
        if now_s - arrival_s > _PATIENCE * (job.deadline_s - arrival_s):
            return arrival_s - now_s  # below 0, as nothing else is
        return left_s

    def spared(self, job: Job, left_s: float, now_s: float) -> float:
        return 0.0

    def gives_way(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        return False


class LeastRelativeSlackFirst:
    """LARS (Medha, arXiv 2409.17264v4): the time that a request has to spare until its deadline, beside what is left of
    its prefill, counted in its prefills.

    So a long prefill in time gives way to short requests that run late, and one that runs late itself does not. While
    the first request has time to spare, steps are shorter, for the decodes in them.

    Beyond the paper, a request gives way to one that is sooner done if it is in time all the same; or if only one of
    them can be, and it is hardly later than that one would be. As published, each chunk makes a prompt less urgent than
    its equals, so that equal ones are computed in turns and all end together; and short ones wait for their deadlines
    beside long ones that have time.
    """

    overtakes = True

    def urgency(self, job: Job, left_s: float, now_s: float) -> float:
        return (job.deadline_s - now_s - left_s) / job.prefill_s

    def spared(self, job: Job, left_s: float, now_s: float) -> float:
        return min(max(self.urgency(job, left_s, now_s), 0.0), _MOST_SPARED)

    def gives_way(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        afterwards = self.urgency(job, left_s, now_s + other_left_s)
        other_is_late = self.urgency(other, other_left_s, now_s + left_s) < 0
        # Prefills may take longer now than when they came.
        later = _LATER * max(left_s / job.prefill_s, 1.0)
        return afterwards >= 0 or (other_is_late and afterwards >= self.urgency(other, other_left_s, now_s) - later)


_POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "edf": EarliestDeadlineFirst,
    "srpt": ShortestRemainingFirst,
    "lars": LeastRelativeSlackFirst,
}
POLICIES = tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """By name. Raises UserError for one that is none of POLICIES."""
    if name not in _POLICIES:
        raise UserError(f"policy {name!r} is not known: use one of {', '.join(POLICIES)}")
    return _POLICIES[name]()
