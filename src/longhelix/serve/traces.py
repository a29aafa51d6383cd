"""Spans of requests for OpenTelemetry: one for each HTTP request that the engine had, with children for the time that
each of its requests waited, was read and was answered."""

import time
from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.serve.course import Course

_FLUSH_MS = 5000


class Traces:
    """endpoint: where a collector takes traces over HTTP. Spans are sent by a thread, and are lost where nobody takes
    them. Raises UserError where the packages are missing."""

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UserError(
                f"traces need OpenTelemetry ({error}): install it as longhelix[trace], or leave out --otlp-endpoint"
            ) from error
        if not endpoint.startswith(("http://", "https://")):
            raise UserError(
                f"otlp_endpoint is {endpoint[:200]!r}: set it to a URL such as http://localhost:4318/v1/traces"
            )
        self._set_span, self._extract = trace.set_span_in_context, TraceContextTextMapPropagator().extract
        self._server_kind, self._model = trace.SpanKind.SERVER, model
        self._epoch_ns = time.time_ns() - round(time.monotonic() * 1e9)
        resource = Resource.create({"service.name": "longhelix"})
        # No client says what whoever runs the server does not get to see.
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=2)))
        self._tracer = self._provider.get_tracer("longhelix")

    def tell(self, headers: Mapping[str, str], facts: Mapping[str, Any], courses: list[Course], came_s: float) -> None:
        """A request that came then has ended just now. headers: its own, of which `traceparent` names the parent."""
        context = self._extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        span = self._tracer.start_span(
            f"POST {facts['route']}",
            context,
            self._server_kind,
            attributes={f"longhelix.{name}": fact for name, fact in facts.items() if fact is not None}
            | {"gen_ai.request.model": self._model},
            start_time=self._at(came_s),
        )
        inside = self._set_span(span)
        for place, course in enumerate(courses):
            for name, begin_s, end_s in _phases(course):
                child = self._tracer.start_span(
                    name, inside, attributes={"longhelix.request": place}, start_time=self._at(begin_s)
                )
                child.end(self._at(end_s))
        span.end()

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _at(self, monotonic_s: float) -> int:
        return self._epoch_ns + round(monotonic_s * 1e9)


def _phases(course: Course) -> list[tuple[str, float, float]]:
    """What a request went through, as far as it came: name, begin and end."""
    times_s = [course.came_s, course.begun_s, course.first_s, course.ended_s]
    over_s = course.ended_s if course.ended_s is not None else time.monotonic()
    phases = []
    for name, begin_s, end_s in zip(("queue", "prefill", "decode"), times_s, times_s[1:], strict=False):
        if begin_s is not None:
            phases.append((name, begin_s, over_s if end_s is None else end_s))
    return phases
