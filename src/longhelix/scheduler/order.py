"""The order in which requests are served: by priority, then by the clients' shares, then by the policy."""

import heapq
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real

from longhelix.errors import UserError
from longhelix.scheduler.pace import Pace
from longhelix.scheduler.policy import Policy
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.sequence import Job, Sequence
from longhelix.scheduler.shares import Shares

Key = tuple[float, ...]
_POLICY = 2  # where the policy's part of a key begins
_MOST_TRIED = 8  # of the prompts with less work left than the first one


class Order:
    """Computes sort keys of requests. The smallest key goes first. times: predicted seconds of prefills."""

    def __init__(self, policy: Policy, shares: Shares, times: PrefillTimes) -> None:
        self.policy = policy
        self.shares = shares
        self.times = times
        self.pace = Pace()

    def waiting(self, job: Job, now_s: float) -> Key:
        """Return the key of a waiting request."""
        return self._key(job, job.prefill_s, now_s)

    def prompts(self, sequences: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Return running prompts in order. A prompt with less work left than the first one goes first if all prompts
        between them on the same KVP rank yield to it, and have the same priority and share."""
        left_s = {seq: self.left_s(seq) for seq in sequences}
        ordered = sorted((self._key(seq.job, left_s[seq], now_s), seq) for seq in left_s)
        homes: dict[int | None, list[tuple[Key, Sequence]]] = {}
        for key, seq in ordered:
            homes.setdefault(seq.kv.placement.home, []).append((key, seq))
        for home_prompts in homes.values():
            first = self._first(home_prompts, left_s, now_s)
            place = [seq for _, seq in home_prompts].index(first)
            home_prompts.insert(0, home_prompts.pop(place))
        next_of = {home: iter(home_prompts) for home, home_prompts in homes.items()}
        return [next(next_of[seq.kv.placement.home])[1] for _, seq in ordered]

    def _first(self, ordered: list[tuple[Key, Sequence]], left_s: Mapping[Sequence, float], now_s: float) -> Sequence:
        peers = [seq for key, seq in ordered if key[:_POLICY] == ordered[0][0][:_POLICY]]
        sooner = [place for place, seq in enumerate(peers) if left_s[seq] < left_s[peers[0]]]
        for place in heapq.nsmallest(_MOST_TRIED, sooner, key=lambda place: (left_s[peers[place]], place)):
            if all(self._yields(seq, peers[place], left_s, now_s) for seq in peers[:place]):
                return peers[place]
        return peers[0]

    def _yields(self, seq: Sequence, other: Sequence, left_s: Mapping[Sequence, float], now_s: float) -> bool:
        seq_left_s, other_left_s = self.pace.factor * left_s[seq], self.pace.factor * left_s[other]
        return bool(self.policy.yields_to(seq.job, seq_left_s, other.job, other_left_s, now_s))

    def left_s(self, seq: Sequence) -> float:
        """Return the seconds that are left of a sequence's prefill."""
        return self.times.between(seq.length, seq.tokens.num_prompt, seq.kv.placement.alone_tokens)

    def headroom_s(self, seq: Sequence, now_s: float, spare_s: float) -> float:
        """Return the time that a step leaves unused if this prompt goes first. spare_s: time that decodes leave."""
        headroom_s = _number("headroom_s", self.policy.headroom_s(seq.job, self.left_s(seq), now_s, spare_s))
        return min(max(headroom_s, 0.0), spare_s)

    def preemption(self, seq: Sequence, lost_s: float, now_s: float) -> Key:
        """Return the preemption key of a running sequence. The smallest key is preempted first."""
        request, key = seq.request, self.policy.preemption_key(seq.job, lost_s, now_s)
        return request.service.priority, _number("preemption_key", key), -request.arrival_s

    def _key(self, job: Job, left_s: float, now_s: float) -> Key:
        request = job.request
        key = _number("sort_key", self.policy.sort_key(job, left_s, now_s))
        return (-request.service.priority, self.shares.had(request.service.client), key, request.arrival_s, request.id)


def _number(name: str, value: object) -> float:
    """Check and convert a number that a policy returned. Raises UserError if it is not a number."""
    if isinstance(value, float) and value == value:
        return value
    if isinstance(value, Real) and value == value:  # such as numpy's
        with suppress(OverflowError):
            return float(value)
    raise UserError(f"the policy's {name} returned {value!r}: return a number that is not NaN")
