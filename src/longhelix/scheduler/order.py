"""The order in which requests are served: by priority, then by what their clients have had, then by the policy."""

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
_MOST_TRIED = 8  # of those that are sooner done


class Order:
    """Keys of requests: the least goes first. `times`: the predicted seconds of prefills."""

    def __init__(self, policy: Policy, shares: Shares, times: PrefillTimes) -> None:
        self.policy = policy
        self.shares = shares
        self.times = times
        self.pace = Pace()

    def waiting(self, job: Job, now_s: float) -> Key:
        """Of one that waits."""
        return self._key(job, job.prefill_s, now_s)

    def prompts(self, sequences: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Those whose prompts are being computed. Of those that share a KVP rank's part of a step, one that is sooner
        done than the first goes before it where all between them yield to it; not before higher priorities, or clients
        that have had less."""
        left_s = {seq: self.left_s(seq) for seq in sequences}
        ordered = sorted((self._key(seq.job, left_s[seq], now_s), seq) for seq in left_s)
        homes: dict[int | None, list[tuple[Key, Sequence]]] = {}
        for key, seq in ordered:
            homes.setdefault(seq.kv.placement.home, []).append((key, seq))
        for of_home in homes.values():
            first = self._first(of_home, left_s, now_s)
            place = [seq for _, seq in of_home].index(first)
            of_home.insert(0, of_home.pop(place))
        rest = {home: iter(of_home) for home, of_home in homes.items()}
        return [next(rest[seq.kv.placement.home])[1] for _, seq in ordered]

    def _first(self, ordered: list[tuple[Key, Sequence]], left_s: Mapping[Sequence, float], now_s: float) -> Sequence:
        peers = [seq for key, seq in ordered if key[:_POLICY] == ordered[0][0][:_POLICY]]
        sooner = [place for place, seq in enumerate(peers) if left_s[seq] < left_s[peers[0]]]
        for place in heapq.nsmallest(_MOST_TRIED, sooner, key=lambda place: (left_s[peers[place]], place)):
            if all(self._yields(seq, peers[place], left_s, now_s) for seq in peers[:place]):
                return peers[place]
        return peers[0]

    def _yields(self, seq: Sequence, other: Sequence, left_s: Mapping[Sequence, float], now_s: float) -> bool:
        left, other_left = self.pace.factor * left_s[seq], self.pace.factor * left_s[other]
        return bool(self.policy.yields_to(seq.job, left, other.job, other_left, now_s))

    def left_s(self, seq: Sequence) -> float:
        """What is left of its prefill."""
        return self.times.between(seq.length, seq.tokens.num_prompt, seq.kv.placement.alone_tokens)

    def headroom_s(self, seq: Sequence, now_s: float, spare_s: float) -> float:
        """How much of a step's time is left unused where this prompt goes first. spare_s: what decodes leave of it."""
        found_s = _number("headroom_s", self.policy.headroom_s(seq.job, self.left_s(seq), now_s, spare_s))
        return min(max(found_s, 0.0), spare_s)

    def preemption(self, seq: Sequence, lost_s: float, now_s: float) -> Key:
        """The key of one that runs: the one with the least is preempted first."""
        request, key = seq.request, self.policy.preemption_key(seq.job, lost_s, now_s)
        return request.service.priority, _number("preemption_key", key), -request.arrival_s

    def _key(self, job: Job, left_s: float, now_s: float) -> Key:
        request = job.request
        key = _number("sort_key", self.policy.sort_key(job, left_s, now_s))
        return (-request.service.priority, self.shares.had(request.service.client), key, request.arrival_s, request.id)


def _number(name: str, value: object) -> float:
    """What a policy returned. Raises UserError unless it can be compared with all other numbers."""
    if isinstance(value, float) and value == value:
        return value
    if isinstance(value, Real) and value == value:  # such as numpy's
        with suppress(OverflowError):
            return float(value)
    raise UserError(f"the policy's {name} returned {value!r}: return a number that is not NaN")
