"""Build a page from a folder of assets (template, style and scripts), the shared assets, and data."""

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from longhelix.errors import UserError

_SHARED = Path(__file__).parent / "assets"


def write(path: Path, assets: Path, scripts: Sequence[str], data: Mapping[str, bytes]) -> None:
    """Write a self-contained page to `path`.

    Args:
        assets: folder with page.html, page.css and the scripts. If page.html contains {{plotly}}, plotly is included.
        scripts: file names of the scripts, in order.
        data: bytes to compress and insert into page.html, by the name of their placeholder.

    Raises:
        UserError: plotly is missing, or `path` cannot be written.
    """
    template = _read(assets / "page.html")
    inserts = {
        "style": "\n".join(_read(folder / "page.css") for folder in (_SHARED, assets)),
        "plotly": _plotly() if "{{plotly}}" in template else "",
        "scripts": "\n".join([_read(_SHARED / "shared.js"), *(_read(assets / name) for name in scripts)]),
        **{name: base64.b64encode(zlib.compress(content)).decode() for name, content in data.items()},
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: inserts[place[1]], template)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): set --out to another folder") from error


def _plotly() -> str:
    """Return the source of plotly.js from the plotly package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the page needs plotly, which is not installed: run pip install 'longhelix[plan]'", "missing_dependency"
        ) from error
    return str(get_plotlyjs())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
