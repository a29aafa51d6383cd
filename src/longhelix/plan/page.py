"""The planner's page: one HTML file that needs nothing else, with the frontiers behind sliders."""

import base64
import json
import re
import zlib
from pathlib import Path

from longhelix.errors import UserError
from longhelix.plan.page_data import Asked, page_data
from longhelix.spec import HardwareSpec, ModelSpec

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("data.js", "format.js", "frontier.js", "step.js", "layout.js", "page.js")


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
) -> None:
    """Write the page, which opens with `context` tokens, these dtypes and `ttl_s` seconds per token (None: a balance).

    Raises UserError where plotly is missing, where the system has no arithmetic in a dtype, and where `path` cannot be
    written.
    """
    plotly = _plotly()
    data = page_data(model, model_name, system, Asked(max_gpus, float(context), weight_dtype, kv_dtype, ttl_s))
    inserts = {
        "style": _asset("page.css"),
        "plotly": plotly,
        "document": _packed(json.dumps(data.document, separators=(",", ":")).encode()),
        "numbers": _packed(data.numbers.astype("<f4").tobytes()),
        "scripts": "\n".join(map(_asset, _SCRIPTS)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: inserts[place[1]], _asset("page.html"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): set --out to another folder") from error


def _plotly() -> str:
    """plotly.js, which plotly's package carries."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the planner's page needs plotly: pip install 'longhelix[plan]'", "missing_dependency"
        ) from error
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()
