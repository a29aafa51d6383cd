"""Write the results page of simulations: one self-contained HTML file. Each plot has one line per run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhelix.plan.html import page
from longhelix.simulate.histogram import RELATIVE_ERROR
from longhelix.simulate.report import VariantResult, rows
from longhelix.simulate.request_tracker import TBT_PERCENT
from longhelix.simulate.timeline import Sample

_ASSETS = Path(__file__).parent / "assets"
_POINTS = 200


def write_page(path: Path, runs: Sequence[VariantResult], title: str, about: str) -> None:
    """Write the results page of one or more runs.

    Args:
        title: heading of the page.
        about: sentence below the heading.

    Raises:
        UserError: plotly is missing, or `path` cannot be written.
    """
    document = {
        "title": title,
        "about": about,
        "note": f"A request is within its SLO if its first token arrives within the TTFT target and {TBT_PERCENT}% of "
        "the times between its tokens are within the TBT target. Percentiles have a relative error of up to "
        f"{RELATIVE_ERROR:.2%}.",
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
