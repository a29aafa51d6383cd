"""Metrics of several servers in one Prometheus text."""

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(texts: Mapping[str, bytes], label: str) -> bytes:
    """Return the metrics of several servers, each with its server in a label.

    Args:
        texts: metrics in the Prometheus text format, by server.
        label: name of the label.
    """
    families: dict[str, Metric] = {}
    for server, text in texts.items():
        for found in text_string_to_metric_families(text.decode()):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [each._replace(labels={label: server} | each.labels) for each in found.samples]
    return generate_latest(_Families(families.values()))
