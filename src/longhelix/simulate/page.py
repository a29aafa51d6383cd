"""The page of a simulation: one HTML file that needs nothing else, with a line for each run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhelix.plan.html import page
from longhelix.simulate.histogram import RELATIVE_ERROR
from longhelix.simulate.ledger import TBT_PERCENT
from longhelix.simulate.report import VariantResult, rows
from longhelix.simulate.timeline import Sample

_ASSETS = Path(__file__).parent / "assets"
_POINTS = 200


def write_page(path: Path, runs: Sequence[VariantResult], title: str, about: str) -> None:
    """Raises UserError where plotly is missing, and where `path` cannot be written."""
    document = {
        "title": title,
        "about": about,
        "note": f"A request is within its SLO if its first token is, and {TBT_PERCENT}% of the times between its "
        f"tokens. Percentiles are within {RELATIVE_ERROR:.2%}.",
        "rows": rows(runs),
        "runs": [_drawn(run) for run in runs],
    }
    page.write(path, _ASSETS, ["page.js"], {"document": json.dumps(document, separators=(",", ":")).encode()})


def _drawn(run: VariantResult) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "name": run.variant.name,
        "ttft": outcome.ttft.curve(_POINTS),
        "tbt": outcome.tbt.curve(_POINTS),
        "timeline": {name: [sample[index] for sample in outcome.timeline] for index, name in enumerate(Sample._fields)},
        "trials": [
            (trial.rate_rps, trial.slo_attainment)
            for trial in sorted(run.capacity.trials if run.capacity else (), key=lambda trial: trial.rate_rps)
        ],
    }
