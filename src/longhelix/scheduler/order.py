"""The order in which requests are served: by priority, then by what their clients have had, then by the policy."""

from longhelix.scheduler.policy import Policy
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.sequence import Job, Sequence
from longhelix.scheduler.shares import Shares

Key = tuple[float, ...]


class Order:
    """Keys of requests: the least goes first. `times`: the predicted seconds of prefills."""

    def __init__(self, policy: Policy, shares: Shares, times: PrefillTimes) -> None:
        self.policy = policy
        self.shares = shares
        self.times = times

    def waiting(self, job: Job, now_s: float) -> Key:
        """Of one that waits."""
        return self._key(job, job.prefill_s, now_s)

    def prompt(self, seq: Sequence, now_s: float) -> Key:
        """Of one whose prompt is being computed."""
        return self._key(seq.job, self.left_s(seq), now_s)

    def left_s(self, seq: Sequence) -> float:
        """What is left of its prefill."""
        return self.times.between(seq.length, seq.num_prompt, seq.placement.alone_tokens)

    def spared(self, seq: Sequence, now_s: float) -> float:
        """The share of a step's time target that need not be used, where this prompt goes first."""
        return self.policy.spared(seq.job, self.left_s(seq), now_s)

    def _key(self, job: Job, left_s: float, now_s: float) -> Key:
        request = job.request
        had, urgency = self.shares.had(request.service.client), self.policy.urgency(job, left_s, now_s)
        return (-request.service.priority, had, urgency, request.arrival_s, request.id)
