"""Adds up the sequence-parallel pass's reports over the stages of a pipeline."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from longhelix.engine.workers.transport import PassReport


def totals(stages: Sequence[PassReport]) -> dict[str, Any]:
    """Return the sum of all stages' reports, in the form of one stage's report."""
    return {
        "patterns": _sum(stage.patterns for stage in stages),
        "collectives": {when: _sum(stage.collectives[when] for stage in stages) for when in ("before", "after")},
        "bytes": {when: _sum(stage.bytes[when] for stage in stages) for when in ("before", "after")},
        "left_alone": list(dict.fromkeys(sentence for stage in stages for sentence in stage.left_alone)),
    }


def _sum(counted: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in counted:
        total.update(counts)  # unlike +, `update` keeps counts of 0
    return dict(total)
