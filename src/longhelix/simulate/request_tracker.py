"""Measure simulated requests: TTFT, time between tokens (TBT), waiting time, and whether they met their SLOs."""

from array import array
from collections.abc import Sequence

import numpy as np

from longhelix.scheduler.request import ServiceLevel
from longhelix.scheduler.step import SampledToken
from longhelix.scheduler.token_event import TokenEvent
from longhelix.simulate.histogram import Histogram, rank
from longhelix.simulate.runner import SimulatedStep

TBT_PERCENT = 99  # percentile of a request's times between tokens that must be within the TBT SLO
_SPARE = 4096


class RequestRecord:
    """The record of one request. Times are in seconds. A time is None until it is known."""

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
        self.begin_s: float | None = None  # start of the step with the request's first chunk
        self.first_s: float | None = None  # time of the first token
        self.end_s: float | None = None  # time of the last token before an interruption or the end
        self.output = 0  # number of tokens before `since`
        self.since = 0  # number of the first step in the current uninterrupted series of steps with tokens
        self.gaps: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []  # times between tokens before `since`
        self.met = False  # True if the request met its service level


class RequestTracker:
    """Follows every request from its arrival to its end.

    Memory use grows with the number of unfinished requests, and with the number of steps since the oldest unfinished
    request began to decode. Memory use does not grow with the length of the simulation.

    The tracker does no work per token to measure times between tokens. The time is the same for all sequences that have
    a token in the previous step and in the current step.
    """

    def __init__(self) -> None:
        self.ttft, self.tbt, self.wait = Histogram(), Histogram(), Histogram()
        self.requests = self.finished = self.met = self.tokens = 0
        self._records: dict[int, RequestRecord] = {}
        self._streaming: dict[int, RequestRecord] = {}  # requests with a token in the previous step, oldest first
        self._beginning: list[int] = []  # requests with a token in this step but not in the previous step
        self._sampled: tuple[SampledToken, ...] | None = None  # tokens of the previous step
        self._ends_s = array("d")  # end times of the latest steps that produced tokens
        self._forgotten = 0  # number of steps with tokens that were removed from `_ends_s`

    def open(self, id: int, arrival_s: float, prompt_tokens: int, service: ServiceLevel) -> None:
        """Record the arrival of a request."""
        self.requests += 1
        self._records[id] = RequestRecord(arrival_s, prompt_tokens, service)

    def drop(self, id: int) -> None:
        """Remove a request that was aborted. Does nothing if the request has already ended."""
        self._records.pop(id, None)

    def refuse(self) -> None:
        """Count a request that can never run."""
        self.requests += 1

    def add(self, ran: SimulatedStep, events: Sequence[TokenEvent]) -> list[tuple[int, RequestRecord]]:
        """Record the end of a step. Returns the requests that ended with this step."""
        for chunk in ran.step.chunks:
            record = self._records.get(chunk.id)
            if record is not None and record.begin_s is None:
                record.begin_s = ran.begin_s
                self.wait.add(max(ran.begin_s - record.arrival_s, 0.0))
        if not events:
            return []
        sampled = ran.result.sampled
        # A runner returns the same tuple as long as the same sequences decode.
        if sampled is not self._sampled or len(events) != len(sampled):
            self._change({event.request_id for event in events})
            self._sampled = sampled if len(events) == len(sampled) else None
        self._add_tokens(ran.end_s)
        return [(event.request_id, self._close(event, ran.end_s)) for event in events if event.finish_reason]

    def _change(self, ids: set[int]) -> None:
        """Prepare for a step that samples tokens for other sequences than the previous step."""
        for id in [id for id in self._streaming if id not in ids]:
            self._interrupt(id)
        self._beginning = sorted(ids - self._streaming.keys())

    def _add_tokens(self, now_s: float) -> None:
        """Count one token for each sequence that continues or begins decoding in this step."""
        if self._streaming:
            self.tbt.add(now_s - self._ends_s[-1], len(self._streaming))
        self._forget()
        self._ends_s.append(now_s)
        for id in self._beginning:
            self._begin(id, now_s)
        self._beginning = []
        self.tokens += len(self._streaming)

    def _begin(self, id: int, now_s: float) -> None:
        """Record a sequence's first token, or its first token after an interruption."""
        record = self._streaming[id] = self._records[id]
        record.since = self._forgotten + len(self._ends_s) - 1
        if record.first_s is None:
            record.first_s = now_s
            self.ttft.add(now_s - record.arrival_s)
        else:
            assert record.end_s is not None
            self.tbt.add(now_s - record.end_s)
            record.gaps.append(np.array([now_s - record.end_s]))

    def _interrupt(self, id: int) -> None:
        """Record that a sequence has no token in this step."""
        record = self._streaming.pop(id)
        record.end_s = self._ends_s[-1]
        times_s = np.array(self._ends_s[record.since - self._forgotten :])
        record.output += len(times_s)
        if record.service.tbt_slo_s is not None:
            record.gaps.append(np.diff(times_s))

    def _close(self, event: TokenEvent, now_s: float) -> RequestRecord:
        self._interrupt(event.request_id)
        record = self._records.pop(event.request_id)
        record.met = self._has_met(record)
        self.finished += 1
        self.met += record.met
        return record

    def _has_met(self, record: RequestRecord) -> bool:
        """True if a request's TTFT and TBT_PERCENT% of its times between tokens were within its SLOs."""
        service, first_s = record.service, record.first_s
        assert first_s is not None
        if service.ttft_slo_s is not None and first_s - record.arrival_s > service.ttft_slo_s:
            return False
        if service.tbt_slo_s is None or record.output < 2:
            return True
        gaps = np.concatenate(record.gaps)
        nearest = rank(TBT_PERCENT, len(gaps)) - 1
        return bool(np.partition(gaps, nearest)[nearest] <= service.tbt_slo_s)

    def _forget(self) -> None:
        """Remove steps from `_ends_s` that are older than the oldest sequence, if there are many such steps."""
        oldest = next(iter(self._streaming.values())).since if self._streaming else self._forgotten + len(self._ends_s)
        unused = oldest - self._forgotten
        if unused > _SPARE and 2 * unused > len(self._ends_s):
            del self._ends_s[:unused]
            self._forgotten = oldest
