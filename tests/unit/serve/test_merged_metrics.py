"""Metrics of several servers in one text."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from longhelix.serve.merged_metrics import merged_metrics

pytestmark = pytest.mark.unit


def metrics(value):
    registry = CollectorRegistry()
    Gauge("longhelix:running", "Running requests", registry=registry).set(value)
    Counter("longhelix:ended", "Ended requests", ["reason"], registry=registry).labels("stop").inc(2 * value)
    Histogram("longhelix:seconds", "Times", buckets=(1, 5), registry=registry).observe(value)
    return generate_latest(registry)


def samples(text):
    return {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(text.decode())
        for each in family.samples
        if not each.name.endswith("_created")
    }


def test_each_sample_has_the_name_of_its_server():
    found = samples(merged_metrics({"a": metrics(1), "b": metrics(4)}, "replica"))
    assert found["longhelix:running", ("replica", "a")] == 1
    assert found["longhelix:running", ("replica", "b")] == 4
    assert found["longhelix:ended_total", ("reason", "stop"), ("replica", "b")] == 8
    assert found["longhelix:seconds_bucket", ("le", "1.0"), ("replica", "a")] == 1
    assert found["longhelix:seconds_bucket", ("le", "1.0"), ("replica", "b")] == 0
    assert len(found) == 2 * len(samples(metrics(1)))


def test_a_metric_is_described_once():
    merged = merged_metrics({"a": metrics(1), "b": metrics(4)}, "replica").decode()
    described = [line for line in merged.splitlines() if line.startswith("#")]
    assert len(described) == len(set(described))
    assert "# TYPE longhelix:ended_total counter" in described
    assert "# TYPE longhelix:seconds histogram" in described


def test_no_servers_have_no_metrics():
    assert merged_metrics({}, "replica") == b""
