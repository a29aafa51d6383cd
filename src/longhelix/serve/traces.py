"""OpenTelemetry spans for HTTP requests that reached the engine.

Each HTTP request has one span. Its child spans show the queue, prefill and decode time of each engine request.
"""

import time
from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.serve.request_progress import RequestProgress

_FLUSH_MS = 5000


class Traces:
    """Sends spans to an OpenTelemetry collector.

    A thread sends the spans. If the collector does not accept a span, the span is lost.

    Args:
        endpoint: URL of the collector's HTTP endpoint for traces.
        model: name of the model, which is an attribute of each span.

    Raises:
        UserError: the OpenTelemetry packages are missing, or the endpoint is not a URL.
    """

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
        # Sample every request, because a client's `traceparent` must not hide requests from the operator.
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=2)))
        self._tracer = self._provider.get_tracer("longhelix")

    def record(
        self, headers: Mapping[str, str], facts: Mapping[str, Any], requests: list[RequestProgress], arrival_s: float
    ) -> None:
        """Record an HTTP request that has just ended.

        Args:
            headers: headers of the HTTP request. `traceparent` names the parent span.
            facts: attributes of the span.
            requests: engine requests of the HTTP request.
            arrival_s: when the HTTP request arrived, on the monotonic clock.
        """
        context = self._extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        span = self._tracer.start_span(
            f"POST {facts['route']}",
            context,
            self._server_kind,
            attributes={f"longhelix.{name}": fact for name, fact in facts.items() if fact is not None}
            | {"gen_ai.request.model": self._model},
            start_time=self._at(arrival_s),
        )
        inside = self._set_span(span)
        for place, progress in enumerate(requests):
            for name, begin_s, end_s in _phases(progress):
                child = self._tracer.start_span(
                    name, inside, attributes={"longhelix.request": place}, start_time=self._at(begin_s)
                )
                child.end(self._at(end_s))
        span.end()

    def close(self) -> None:
        """Send the remaining spans. This takes at most a few seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _at(self, monotonic_s: float) -> int:
        """Convert a time on the monotonic clock to wall-clock time in nanoseconds."""
        return self._epoch_ns + round(monotonic_s * 1e9)


def _phases(progress: RequestProgress) -> list[tuple[str, float, float]]:
    """Return the name, start time and end time of each phase that a request reached."""
    times_s = [progress.arrival_s, progress.first_step_s, progress.first_token_s, progress.ended_s]
    over_s = progress.ended_s if progress.ended_s is not None else time.monotonic()
    phases = []
    for name, begin_s, end_s in zip(("queue", "prefill", "decode"), times_s, times_s[1:], strict=False):
        if begin_s is not None:
            phases.append((name, begin_s, over_s if end_s is None else end_s))
    return phases
