"""Records the events of one rank for a trace."""

import time
from collections.abc import Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass
from typing import Any

import torch

from longhelix.compute.kernels import native
from longhelix.compute.runner.trace import TraceEvent
from longhelix.spans import Spans

_PENDING_S = 10.0  # a collective's callback may run a moment after the wait for it has ended

Mark = Any  # a moment of a clock: memory with a time, or a CUDA event


class _CpuClock:
    """Reads CLOCK_MONOTONIC at once. When a tape runs again, it writes new times into the marks that it recorded."""

    def mark(self) -> Mark:
        if native.module is None:
            return c_int64(time.monotonic_ns())
        ns = c_int64()
        native.module.mark(addressof(ns))
        return ns

    def us(self, mark: Mark) -> float:
        return mark.value / 1e3


class _CudaClock:
    """Records CUDA events in the current stream, relative to an event whose time is known on both clocks."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._zero = self.mark()
        self._zero.synchronize()
        self._zero_us = time.monotonic_ns() / 1e3

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, mark: Mark) -> float:
        mark.synchronize()
        return self._zero_us + 1e3 * self._zero.elapsed_time(mark)


@dataclass(eq=False, slots=True)
class _Span:
    """A begun event. It starts at `start`, or when the last of `follows` ends."""

    name: str
    kind: str
    start: Mark
    follows: tuple["_Span", ...]
    details: dict[str, int]
    end: Mark = None


class Tracer(Spans):
    """Collects the events of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
        self._spans: list[_Span] = []
        self._taped_events: list[TraceEvent] = []  # of previous runs of tapes
        self._last_taped: tuple[_Span, ...] = ()  # of the tape that ran last
        self._layer: dict[str, int] = {}
        self._part: dict[str, int] = {}
        self._attention_spans: list[_Span] = []  # the attentions and exchanges of this layer

    def layer(self, index: int | None) -> None:
        self._layer = {} if index is None else {"layer": index}
        self._attention_spans, self._part = [], {}

    def begin(self, name: str, kind: str = "compute", part: int | None = None) -> _Span:
        if part is not None:
            self._part = {"part": part}
        parted = part is not None or kind == "exchange"
        span = self._new(name, kind, self._part if parted else {}, self._clock.mark(), ())
        if parted:
            self._attention_spans.append(span)
        return span

    def follow(self, name: str) -> _Span:
        return self._new(name, "compute", {}, None, tuple(self._attention_spans))

    def end(self, span: _Span) -> None:
        span.end = self._clock.mark()

    def end_with(self, span: _Span, work: Any) -> None:
        work.get_future().add_done_callback(lambda future: self.end(span))

    def count(self) -> int:
        return len(self._spans)

    def taped(self, count: int) -> tuple[_Span, ...]:
        spans = tuple(self._spans[count:])
        del self._spans[count:]
        self.again(spans)
        return spans

    def again(self, spans: tuple[_Span, ...]) -> None:
        self._taped_events += self._events(self._last_taped)
        self._last_taped = spans

    def take(self) -> list[TraceEvent]:
        """The events since the last call. Waits for their ends."""
        events = [*self._taped_events, *self._events(self._last_taped), *self._events(self._spans)]
        self._spans, self._taped_events, self._last_taped, self._attention_spans = [], [], (), []
        return events

    def _new(self, name: str, kind: str, details: dict[str, int], start: Mark, follows: tuple[_Span, ...]) -> _Span:
        span = _Span(name=name, kind=kind, start=start, follows=follows, details=self._layer | details)
        self._spans.append(span)
        return span

    def _events(self, spans: Sequence[_Span]) -> list[TraceEvent]:
        return [
            TraceEvent(
                name=span.name,
                kind=span.kind,
                start_us=self._start_us(span),
                end_us=self._end_us(span),
                details=span.details,
            )
            for span in spans
        ]

    def _start_us(self, span: _Span) -> float:
        return max(map(self._end_us, span.follows)) if span.follows else self._clock.us(span.start)

    def _end_us(self, span: _Span) -> float:
        deadline_s = time.monotonic() + _PENDING_S
        while span.end is None:  # seldom; an event for each span to wait for would take longer than the span costs
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{span.name} was not completed within {_PENDING_S:.0f} s of its wait")
            time.sleep(1e-4)
        return self._clock.us(span.end)
