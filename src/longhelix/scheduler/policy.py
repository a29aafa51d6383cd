"""Policies: which request goes next."""

from longhelix.errors import UserError
from longhelix.scheduler.sequence import Job

# Of a request's time to its deadline: after so many of them it no longer waits for shorter ones.
_PATIENCE = 10.0
_MOST_HEADROOM = 0.4
# Of a request's prefill: so much later than another one it may be, to let that be done first. A bit above 1: of two
# equal ones the second is later by a whole prefill when the first is done.
_LATER = 1.1


class Policy:
    """Decides which request is served first: the one that arrived first. A subclass changes what it wants to.

    A policy has no state of its own, reads no clock, and is asked again for each step. Times are in seconds on the
    scheduler's clock. Priorities and clients' shares come before any policy.

    Attributes:
        overtakes: A request that fits may be admitted before an earlier one that does not.
    """

    overtakes: bool = False

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        """Return a number. The request with the smallest number runs first. Ties run in the order of arrival.

        Args:
            left_s: what is left of its prefill, as predicted.
        """
        return job.request.arrival_s

    def headroom_s(self, job: Job, left_s: float, now_s: float, spare_s: float) -> float:
        """Return how much of a step's time is left unused where this request goes first, for the decodes in the step.

        Args:
            left_s: what is left of its prefill, as predicted.
            spare_s: what decodes leave of the step's target.
        """
        return 0.0

    def yields_to(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        """Return whether a request lets another one be done before it, which comes later in the order and has less left
        of its prefill."""
        return False

    def preemption_key(self, job: Job, lost_s: float, now_s: float) -> float:
        """Return a number for a request that runs. Where KV blocks run out, the one with the smallest loses its own.

        Args:
            lost_s: what it takes to compute its KV again, as predicted.
        """
        return lost_s


class EarliestDeadlineFirst(Policy):
    """The request whose first token is due first."""

    overtakes = True

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        return job.deadline_s


class ShortestRemainingFirst(Policy):
    """The request with the least left of its prefill. One that has waited ten times as long as its deadline allows goes
    before those that have not, so that none waits forever."""

    overtakes = True

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        arrival_s = job.request.arrival_s
        if now_s - arrival_s > _PATIENCE * (job.deadline_s - arrival_s):
            return arrival_s - now_s  # below 0, as nothing else is
        return left_s


class LeastRelativeSlackFirst(Policy):
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

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        return (job.deadline_s - now_s - left_s) / job.prefill_s

    def headroom_s(self, job: Job, left_s: float, now_s: float, spare_s: float) -> float:
        return spare_s * min(max(self.sort_key(job, left_s, now_s), 0.0), _MOST_HEADROOM)

    def yields_to(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        afterwards = self.sort_key(job, left_s, now_s + other_left_s)
        other_is_late = self.sort_key(other, other_left_s, now_s + left_s) < 0
        # Prefills may take longer now than when they came.
        later = _LATER * max(left_s / job.prefill_s, 1.0)
        return afterwards >= 0 or (other_is_late and afterwards >= self.sort_key(other, other_left_s, now_s) - later)


_POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy,
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
