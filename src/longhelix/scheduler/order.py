"""The order in which requests are served: by priority, then by what their clients have had, then by the policy."""

from collections.abc import Iterable

from longhelix.scheduler.policy import Policy
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.sequence import Job, Sequence
from longhelix.scheduler.shares import Shares

Key = tuple[float, ...]
_POLICY = 2  # where the policy's part of a key begins


class Order:
    """Keys of requests: the least goes first. `times`: the predicted seconds of prefills."""

    def __init__(self, policy: Policy, shares: Shares, times: PrefillTimes) -> None:
        self.policy = policy
        self.shares = shares
        self.times = times

    def waiting(self, job: Job, now_s: float) -> Key:
        """Of one that waits."""
        return self._key(job, job.prefill_s, now_s)

    def prompts(self, sequences: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Those whose prompts are being computed. The one that is soonest done goes first where all before it give
        way; not before higher priorities, or clients that have had less."""
        ordered = sorted((self._key(seq.job, self.left_s(seq), now_s), seq) for seq in sequences)
        peers = [seq for key, seq in ordered if key[:_POLICY] == ordered[0][0][:_POLICY]]
        left_s = [self.left_s(seq) for seq in peers]
        soonest = left_s.index(min(left_s))
        job, done_s = peers[soonest].job, left_s[soonest]
        before = zip(peers[:soonest], left_s[:soonest], strict=True)
        if all(self.policy.gives_way(seq.job, seq_s, job, done_s, now_s) for seq, seq_s in before):
            ordered.insert(0, ordered.pop(soonest))
        return [seq for _, seq in ordered]

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
