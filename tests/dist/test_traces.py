"""Spans that a server sends to a collector."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from serving_process import serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.dist

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(HTTPServer):
    """Keeps the spans that it is sent, at any free port."""

    def __init__(self):
        self.spans = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.mark.slow
def test_a_request_is_a_span_with_its_phases_under_the_clients():
    collector = Collector()
    listening = threading.Thread(target=collector.serve_forever)
    listening.start()
    try:
        with serving("--kvp", "2", "--max-model-len", "1024", "--otlp-endpoint", collector.url) as server:
            ask = {"prompt": [7] * 200, "max_tokens": 4, "n": 2, "ignore_eos": True}
            url = f"{server.url}/v1/completions"
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}  # of a client that keeps none of its own
            answer = httpx.post(url, json=ask, headers=headers, timeout=120)
            bare = httpx.post(url, json=ask | {"n": 1}, headers={"traceparent": "nonsense"}, timeout=120)
            refused = httpx.post(url, json={"prompt": ""}, timeout=120)
            assert [each.status_code for each in (answer, bare, refused)] == [200, 200, 400]
            assert server.end() == 0
    finally:
        collector.shutdown()
        listening.join()
        collector.server_close()
    whole = {span.span_id: span for span in collector.spans if span.name == "POST /v1/completions"}
    facts = {_attributes(span)["longhelix.id"].string_value: span for span in whole.values()}
    assert facts.keys() == {answer.headers["x-request-id"], bare.headers["x-request-id"]}
    span, other = facts[answer.headers["x-request-id"]], facts[bare.headers["x-request-id"]]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert other.trace_id.hex() != TRACE
    assert other.parent_span_id == b""
    assert _attributes(span)["longhelix.new_tokens"].int_value == 8
    assert _attributes(span)["gen_ai.request.model"].string_value == "builtin"
    phases = [child for child in collector.spans if child.parent_span_id == span.span_id]
    for place in range(2):
        mine = [child for child in phases if _attributes(child)["longhelix.request"].int_value == place]
        assert [child.name for child in mine] == ["queue", "prefill", "decode"]
        times = [span.start_time_unix_nano]
        for child in mine:
            times += [child.start_time_unix_nano, child.end_time_unix_nano]
        assert times == sorted(times)
        assert times[-1] <= span.end_time_unix_nano
    assert {child.trace_id.hex() for child in phases} == {TRACE}


def _attributes(span):
    return {each.key: each.value for each in span.attributes}
