"""What one rank does from when to when. Its functions and collectives are wrapped for it; untraced, nothing is."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from longhelix.models.decoder import Layer
from longhelix.runner.runner import ModelRunner
from longhelix.runner.trace import TraceEvent

_PENDING_S = 10.0  # a collective's callback may run a moment after the wait for it has ended
_EXCHANGES = ("alltoall_base", "exchange")
_COLLECTIVES = {"allreduce": "all-reduce", "all_reduce_add": "all-reduce", "gather": "gather", "broadcast": "broadcast"}

Mark = Any  # of a clock: microseconds, or an event of CUDA


class _CpuClock:
    """Microseconds of CLOCK_MONOTONIC, at once."""

    def mark(self) -> Mark:
        return time.monotonic_ns() / 1e3

    def us(self, mark: Mark) -> float:
        return mark


class _CudaClock:
    """Events of the current stream: when the GPU reached them, from one moment that both clocks know."""

    def __init__(self) -> None:
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


@dataclass
class _Span:
    """A begun event. It starts at the last of `starts`, some of which are spans that it follows."""

    name: str
    kind: str
    starts: tuple["Mark | _Span", ...]
    details: dict[str, int]
    end: Mark = None
    ended: threading.Event = field(default_factory=threading.Event)


class Tracer:
    """Collects the events of one rank. Collectives last until the transport completes them, whoever waits for that.

    attach: traces a runner, whose collectives `handle` has wrapped. take: the events since the last call.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock() if device.type == "cuda" else _CpuClock()
        self._spans: list[_Span] = []
        self._layer: dict[str, int] = {}
        self._part = 0
        self._before: tuple[Mark | _Span, ...] = ()

    def attach(self, runner: ModelRunner) -> None:
        """Wrap a runner's phases, and those of its layers, which must run op by op."""
        runner.sample = self.timed("sampling", runner.sample)
        runner.model.embed = self.timed("embedding", runner.model.embed)
        for index, layer in enumerate(runner.model.layers):
            self._attach_layer(index, layer)

    def handle(self, handle: Any) -> "TracedHandle":
        """A process group whose collectives are events."""
        return TracedHandle(handle, self)

    def timed(self, name: str, function: Callable, **details: int) -> Callable:
        """`function`, each call of which is an event of kind compute."""

        @wraps(function)
        def call(*arguments, **options):
            span = self.begin(name, "compute", **details)
            result = function(*arguments, **options)
            self.end(span)
            return result

        return call

    def attend(self, function: Callable) -> Callable:
        """As `timed`, for attention to one part after another; what came before in the layer is its QKV."""

        @wraps(function)
        def call(*arguments, **options):
            if self._part == 0 and self._before:
                self.end(self.begin("QKV", "compute", self._before))
            span = self.begin("attention", "compute", part=self._part)
            result = function(*arguments, **options)
            self.end(span)
            self._before = (span,)
            self._part += 1
            return result

        return call

    def begin(self, name: str, kind: str, starts: tuple[Mark | _Span, ...] = (), **details: int) -> _Span:
        """An event from now, or from the last of `starts`."""
        span = _Span(name, kind, starts or (self._clock.mark(),), self._layer | details)
        self._spans.append(span)
        return span

    def end(self, span: _Span) -> None:
        """Its end is now; may be said on another thread."""
        span.end = self._clock.mark()
        span.ended.set()

    def begin_exchange(self) -> _Span:
        """An exchange from now: that of the part that attended last."""
        span = self.begin("exchange", "exchange", part=self._part - 1)
        self._before = (*self._before, span)
        return span

    def take(self) -> list[TraceEvent]:
        """The events since the last call; all have been waited for."""
        spans, self._spans = self._spans, []
        return [
            TraceEvent(span.name, span.kind, self._start_us(span), self._end_us(span), span.details) for span in spans
        ]

    def _attach_layer(self, index: int, layer: Layer) -> None:
        forward = layer.attention.forward

        def attention(*arguments):
            self._layer, self._part, self._before = {"layer": index}, 0, (self._clock.mark(),)
            result = forward(*arguments)
            self.end(self.begin("merge and output projection", "compute", self._before))
            self._layer, self._before = {}, ()
            return result

        layer.attention.forward = attention
        layer.attention.attend = self.attend(layer.attention.attend)
        layer.ffn.forward = self.timed("FFN", layer.ffn.forward, layer=index)

    def _start_us(self, span: _Span) -> float:
        return max(self._end_us(s) if isinstance(s, _Span) else self._clock.us(s) for s in span.starts)

    def _end_us(self, span: _Span) -> float:
        if not span.ended.wait(_PENDING_S):
            raise RuntimeError(f"{span.name} was not completed within {_PENDING_S:.0f} s of its wait")
        return self._clock.us(span.end)


class TracedHandle:
    """A process group, or the shared memory behind one, with a `Tracer` told of every collective."""

    def __init__(self, handle: Any, tracer: Tracer) -> None:
        self._handle = handle
        self._tracer = tracer
        if hasattr(handle, "channel"):
            self.channel = TracedHandle(handle.channel, tracer)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._handle, name)
        if name in _EXCHANGES:
            return self._traced(found, self._tracer.begin_exchange)
        if name in _COLLECTIVES:
            return self._traced(found, partial(self._tracer.begin, _COLLECTIVES[name], "collective"))
        return found

    def _traced(self, collective: Callable, begin: Callable[[], _Span]) -> Callable:
        @wraps(collective)
        def call(*arguments):
            span = begin()
            work = collective(*arguments)
            if work is None:  # shared memory: done when it returns
                self._tracer.end(span)
            else:
                work.get_future().add_done_callback(lambda future: self._tracer.end(span))
            return work

        return call
