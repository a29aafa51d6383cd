"""Write the planner's page: one self-contained HTML file with the plan's frontiers and answer, and with controls."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longhelix.plan.answer import Plan
from longhelix.plan.html import page
from longhelix.plan.page_data import page_data

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = (
    "data.js", "service.js", "chart.js", "frontier.js", "step.js", "layout.js", "compare.js", "controls.js", "page.js",
)  # fmt: skip
# Fields of a plan's JSON that the page of another plan needs to compare both plans.
_COMPARED = (
    "model", "system", "weight_dtype", "expert_dtype", "kv_dtype", "draft_tokens", "accepted_tokens", "context",
    "max_gpus", "targets", "gpu_hour", "at_ttl", "headline", "best", "nearest", "frontier",
)  # fmt: skip


def write_page(path: Path, plan: Plan, as_object: Mapping[str, Any]) -> None:
    """Write the page of a plan. The page initially shows the plan's question.

    Args:
        as_object: the plan as a JSON object, including the name of the model.

    Raises:
        UserError: `path` cannot be written.
    """
    data = page_data(plan, as_object["model"], {name: as_object[name] for name in _COMPARED})
    document = json.dumps(data.document, separators=(",", ":")).encode()
    page.write(path, _ASSETS, _SCRIPTS, {"document": document, "numbers": data.numbers.astype("<f4").tobytes()})
