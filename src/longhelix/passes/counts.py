"""What passes count of the graphs that they see. It lies where torch keeps such counts: torch stores them with a
compiled graph, and adds them again when the graph comes from its cache."""

from collections import Counter
from typing import TypedDict

from torch._dynamo.utils import counters

from longhelix.passes.collectives import Collective
from longhelix.passes.patterns import CHUNK, GATHERED, REDUCED

_OF_PASSES = "sequence_parallel/"


class Report(TypedDict):
    """patterns: matches by name. collectives: by "before" and "after", those of each kind. bytes: by "before" and
    "after", what a rank sends of each dtype. left_alone: why collectives stayed, in sentences."""

    patterns: dict[str, int]
    collectives: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    left_alone: list[str]


class Counts:
    """Those of the graphs that passes with the same options have seen. options: a digest of these."""

    def __init__(self, options: str) -> None:
        self.prefix = f"{_OF_PASSES}{options[:16]}/"

    def add(self, kind: str, name: str, count: int = 1) -> None:
        counters["inductor"][f"{self.prefix}{kind}/{name}"] += count

    def add_collectives(self, before: list[Collective], after: list[Collective]) -> None:
        """Those that a graph had, and has."""
        for when, found in (("before", before), ("after", after)):
            for name, count in Counter(each.name for each in found).items():
                self.add("collectives", f"{when}/{name}", count)
            for each in found:
                self.add("bytes", f"{when}/{each.dtype}", each.sent_bytes)

    def report(self) -> Report:
        return _report(self.prefix)


def report() -> Report:
    """Of all graphs so far that passes of this process have seen: see `SequenceParallel.report`."""
    return _report(_OF_PASSES)


def _report(prefix: str) -> Report:
    found: Report = {
        "patterns": dict.fromkeys((*REDUCED, *GATHERED, CHUNK), 0),
        "collectives": {"before": {}, "after": {}},
        "bytes": {"before": {}, "after": {}},
        "left_alone": [],
    }
    for (kind, name), count in _counted(prefix).items():
        when, _, what = name.partition("/")
        match kind:
            case "patterns":
                found["patterns"][name] = count
            case "collectives":
                found["collectives"][when][what] = count
            case "bytes":
                found["bytes"][when][what] = count
            case "left_alone":
                found["left_alone"].append(name)
    return found


def _counted(prefix: str) -> Counter[tuple[str, str]]:
    """By kind and name."""
    found: Counter[tuple[str, str]] = Counter()
    for key, count in counters["inductor"].items():
        if key.startswith(prefix):
            _, _, kind, name = key.split("/", 3)
            found[kind, name] += count
    return found
