"""Policies: which request goes next."""

from longhelix.errors import UserError
from longhelix.scheduler.sequence import Job

# A request no longer waits for shorter ones after this multiple of its time to its deadline.
_PATIENCE = 10.0
_MOST_HEADROOM = 0.4
# How much later than another request a request may be and still let it go first, in prefills. A bit above 1: of two
# equal requests, the second is later by a whole prefill when the first is done.
_LATER = 1.1


class Policy:
    """Decides which request is served first: the one that arrived first. Subclasses override methods.

    A policy has no state and reads no clock. The scheduler calls it again for each step. Times are in seconds on the
    scheduler's clock. Priorities and clients' shares come before any policy.

    Attributes:
        overtakes: A request that fits may be admitted before an earlier one that does not.
    """

    overtakes: bool = False

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        """Return a number. The request with the smallest number runs first. Ties run in the order of arrival.

        Args:
            left_s: predicted seconds that are left of its prefill.
        """
        return job.request.arrival_s

    def headroom_s(self, job: Job, left_s: float, now_s: float, spare_s: float) -> float:
        """Return the time that a step leaves unused for its decodes if this request goes first.

        Args:
            left_s: predicted seconds that are left of its prefill.
            spare_s: the time that decodes leave of the step's target.
        """
        return 0.0

    def yields_to(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        """Return whether a request lets a later one with less work left go first."""
        return False

    def preemption_key(self, job: Job, lost_s: float, now_s: float) -> float:
        """Return a number for a running request. If KV blocks run out, the request with the smallest is preempted.

        Args:
            lost_s: predicted seconds to compute its KV again.
        """
        return lost_s


class EarliestDeadlineFirst(Policy):
    """Serves the request whose first token is due first."""

    overtakes = True

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        return job.deadline_s


class ShortestRemainingFirst(Policy):
    """Serves the request with the shortest remaining prefill.

    A request that has waited ten times as long as its deadline allows goes first, so that none waits forever.
    """

    overtakes = True

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        arrival_s = job.request.arrival_s
        if now_s - arrival_s > _PATIENCE * (job.deadline_s - arrival_s):
            return arrival_s - now_s  # below 0, unlike all other keys
        return left_s


class LeastRelativeSlackFirst(Policy):
    """LARS (Medha, arXiv 2409.17264v4): serves the request with the least slack relative to its prefill.

    So a long prefill that is in time yields to late short requests, but a late one does not. While the first request
    has slack, steps are shorter, for the decodes in them.

    Beyond the paper, a request yields to one with less work left if it stays in time; or if only one of them can be in
    time, and it would hardly be later than the other one. As published, each chunk makes a prompt less urgent than
    equal ones, so that equal prompts are computed in turns and all end together, and short prompts wait until their
    deadlines although long ones have slack.
    """

    overtakes = True

    def sort_key(self, job: Job, left_s: float, now_s: float) -> float:
        return (job.deadline_s - now_s - left_s) / job.prefill_s

    def headroom_s(self, job: Job, left_s: float, now_s: float, spare_s: float) -> float:
        return spare_s * min(max(self.sort_key(job, left_s, now_s), 0.0), _MOST_HEADROOM)

    def yields_to(self, job: Job, left_s: float, other: Job, other_left_s: float, now_s: float) -> bool:
        afterwards = self.sort_key(job, left_s, now_s + other_left_s)
        other_is_late = self.sort_key(other, other_left_s, now_s + left_s) < 0
        # Prefills may take longer now than when the requests arrived.
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
    """Return the policy of a name. Raises UserError if the name is not in POLICIES."""
    if name not in _POLICIES:
        raise UserError(f"policy {name!r} is not known: use one of {', '.join(POLICIES)}")
    return _POLICIES[name]()
