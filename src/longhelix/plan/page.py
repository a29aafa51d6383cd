"""The planner's page: one HTML file that needs nothing else, with the frontiers behind sliders."""

import json
from pathlib import Path

from longhelix.page import page
from longhelix.plan.page_data import Asked, page_data
from longhelix.spec import HardwareSpec, ModelSpec

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("data.js", "frontier.js", "step.js", "layout.js", "page.js")


def write_page(
    path: Path,
    model: ModelSpec,
    model_name: str,
    system: HardwareSpec,
    *,
    max_gpus: int,
    context: float,
    weight_dtype: str,
    kv_dtype: str,
    ttl_s: float | None,
    expert_dtype: str | None = None,
    draft_tokens: int = 0,
    accepted_tokens: float = 1.0,
) -> None:
    """Write the page, which opens with `context` tokens, these dtypes and `ttl_s` seconds per token (None: a balance).
    Steps verify `draft_tokens` of each request, and give it `accepted_tokens` (`Setting`).

    expert_dtype: of experts, with `weight_dtype` of all others; other choices on the page have one dtype for both.

    Raises UserError where plotly is missing, where the system has no arithmetic in a dtype, and where `path` cannot be
    written.
    """
    drafts = draft_tokens, accepted_tokens
    asked = Asked(max_gpus, float(context), weight_dtype, kv_dtype, ttl_s, expert_dtype, *drafts)
    data = page_data(model, model_name, system, asked)
    document = json.dumps(data.document, separators=(",", ":")).encode()
    page.write(path, _ASSETS, _SCRIPTS, {"document": document, "numbers": data.numbers.astype("<f4").tobytes()})
