"""Count the changes that passes make to graphs.

The counts are part of torch's own counters. Torch stores its counters with a compiled graph, and adds the stored counts
again when it loads the graph from its cache.
"""

from collections import Counter
from typing import TypedDict

from torch._dynamo.utils import counters

from longhelix.passes.collectives import Collective
from longhelix.passes.patterns import CHUNK, GATHERED, REDUCED

_PREFIX = "sequence_parallel/"


class Report(TypedDict):
    """The changes that passes made to the graphs of a process."""

    patterns: dict[str, int]  # matches by pattern name
    collectives: dict[str, dict[str, int]]  # "before" and "after" -> count by kind
    bytes: dict[str, dict[str, int]]  # "before" and "after" -> bytes that a rank sends, by dtype
    left_alone: list[str]  # one sentence per reason for which the pass left a collective or a graph unchanged


class Counts:
    """Counts of all graphs that passes with the same options have processed.

    Args:
        options: Digest of the options.
    """

    def __init__(self, options: str) -> None:
        self.prefix = f"{_PREFIX}{options[:16]}/"

    def add(self, kind: str, name: str, count: int = 1) -> None:
        counters["inductor"][f"{self.prefix}{kind}/{name}"] += count

    def add_collectives(self, before: list[Collective], after: list[Collective]) -> None:
        """Count a graph's collectives before and after the pass."""
        for when, found in (("before", before), ("after", after)):
            for name, count in Counter(each.name for each in found).items():
                self.add("collectives", f"{when}/{name}", count)
            for each in found:
                self.add("bytes", f"{when}/{each.dtype}", each.sent_bytes)

    def report(self) -> Report:
        return _report(self.prefix)


def report() -> Report:
    """Report on all graphs that the passes of this process have processed so far. See `SequenceParallel.report`."""
    return _report(_PREFIX)


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
    """Return the counts under a prefix, by kind and name."""
    found: Counter[tuple[str, str]] = Counter()
    for key, count in counters["inductor"].items():
        if key.startswith(prefix):
            _, _, kind, name = key.split("/", 3)
            found[kind, name] += count
    return found
