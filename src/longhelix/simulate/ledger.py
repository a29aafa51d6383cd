"""What requests got, and when: times to first tokens and between tokens, and who met the service level."""

from array import array
from collections.abc import Sequence

import numpy as np

from longhelix.scheduler.request import ServiceLevel
from longhelix.scheduler.step import SampledToken
from longhelix.scheduler.token_event import TokenEvent
from longhelix.simulate.histogram import Histogram, rank
from longhelix.simulate.runner import SimulatedStep

TBT_PERCENT = 99  # of a request's times between tokens, which is held against its SLO
_SPARE = 4096


class Account:
    """One request that has not ended. Times in seconds, None until they are known."""

    __slots__ = (
        "arrival_s",
        "begin_s",
        "end_s",
        "first_s",
        "gaps",
        "met",
        "output",
        "prompt_tokens",
        "service",
        "since",
    )

    def __init__(self, arrival_s: float, prompt_tokens: int, service: ServiceLevel) -> None:
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.service = service
        self.begin_s: float | None = None  # of its first chunk's step
        self.first_s: float | None = None
        self.end_s: float | None = None
        self.output = 0
        self.since = 0  # the step from which on it has had a token in every one
        self.gaps: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []  # between tokens before that
        self.met = False


class Ledger:
    """Follows every request from its arrival to its end.

    What it keeps grows with the requests that have not ended, and with the steps that the oldest of them has seen, and
    not with how long the simulation goes on. Times between tokens need no work for each token: sequences that had a
    token in the last step and in this one all waited for the time between both.
    """

    def __init__(self) -> None:
        self.ttft, self.tbt, self.wait = Histogram(), Histogram(), Histogram()
        self.requests = self.finished = self.met = self.tokens = 0
        self._accounts: dict[int, Account] = {}
        self._streaming: dict[int, Account] = {}  # those with a token in the last step, the longest there first
        self._beginning: list[int] = []  # those with a token in this step alone
        self._sampled: tuple[SampledToken, ...] | None = None  # what all of them got in the last step
        self._ends_s = array("d")  # of the last steps that gave tokens
        self._forgotten = 0  # how many such steps were before

    def open(self, id: int, arrival_s: float, prompt_tokens: int, service: ServiceLevel) -> None:
        """A request came."""
        self.requests += 1
        self._accounts[id] = Account(arrival_s, prompt_tokens, service)

    def drop(self, id: int) -> None:
        """A request ended before its last token, or had ended."""
        self._accounts.pop(id, None)

    def refuse(self) -> None:
        """A request that could never run."""
        self.requests += 1

    def add(self, ran: SimulatedStep, events: Sequence[TokenEvent]) -> list[tuple[int, Account]]:
        """Write down a step that has ended. Returns the requests that ended with it."""
        for chunk in ran.step.chunks:
            account = self._accounts.get(chunk.id)
            if account is not None and account.begin_s is None:
                account.begin_s = ran.begin_s
                self.wait.add(max(ran.begin_s - account.arrival_s, 0.0))
        if not events:
            return []
        sampled = ran.result.sampled
        # A runner gives the same tuple again while the same sequences decode.
        if sampled is not self._sampled or len(events) != len(sampled):
            self._change({event.request_id for event in events})
            self._sampled = sampled if len(events) == len(sampled) else None
        self._add_tokens(ran.end_s)
        return [(event.request_id, self._close(event, ran.end_s)) for event in events if event.finish_reason]

    def _change(self, ids: set[int]) -> None:
        """Other sequences get tokens than in the last step."""
        for id in [id for id in self._streaming if id not in ids]:
            self._interrupt(id)
        self._beginning = sorted(ids - self._streaming.keys())

    def _add_tokens(self, now_s: float) -> None:
        """A token each for those that had one in the last step, and for those that begin."""
        if self._streaming:
            self.tbt.add(now_s - self._ends_s[-1], len(self._streaming))
        self._forget()
        self._ends_s.append(now_s)
        for id in self._beginning:
            self._begin(id, now_s)
        self._beginning = []
        self.tokens += len(self._streaming)

    def _begin(self, id: int, now_s: float) -> None:
        """A sequence's first token, or its first one after an interruption."""
        account = self._streaming[id] = self._accounts[id]
        account.since = self._forgotten + len(self._ends_s) - 1
        if account.first_s is None:
            account.first_s = now_s
            self.ttft.add(now_s - account.arrival_s)
        else:
            assert account.end_s is not None
            self.tbt.add(now_s - account.end_s)
            account.gaps.append(np.array([now_s - account.end_s]))

    def _interrupt(self, id: int) -> None:
        """A sequence gets no further token for the time being."""
        account = self._streaming.pop(id)
        account.end_s = self._ends_s[-1]
        times_s = np.array(self._ends_s[account.since - self._forgotten :])
        account.output += len(times_s)
        if account.service.tbt_slo_s is not None:
            account.gaps.append(np.diff(times_s))

    def _close(self, event: TokenEvent, now_s: float) -> Account:
        self._interrupt(event.request_id)
        account = self._accounts.pop(event.request_id)
        account.met = self._has_met(account)
        self.finished += 1
        self.met += account.met
        return account

    def _has_met(self, account: Account) -> bool:
        """Whether a request's first token and TBT_PERCENT of its times between tokens came within its SLOs."""
        service, first_s = account.service, account.first_s
        assert first_s is not None
        if service.ttft_slo_s is not None and first_s - account.arrival_s > service.ttft_slo_s:
            return False
        if service.tbt_slo_s is None or account.output < 2:
            return True
        gaps = np.concatenate(account.gaps)
        nearest = rank(TBT_PERCENT, len(gaps)) - 1
        return bool(np.partition(gaps, nearest)[nearest] <= service.tbt_slo_s)

    def _forget(self) -> None:
        """Drop the steps before the oldest sequence's, once they are many."""
        oldest = next(iter(self._streaming.values())).since if self._streaming else self._forgotten + len(self._ends_s)
        unused = oldest - self._forgotten
        if unused > _SPARE and 2 * unused > len(self._ends_s):
            del self._ends_s[:unused]
            self._forgotten = oldest
