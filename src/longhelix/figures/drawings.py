"""Write drawings as PNG and SVG files with matplotlib (the extra `plan`). It is imported only when needed."""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from longhelix.errors import UserError
from longhelix.figures.claims import Drawing

_DPI = 72
_STYLE = {"svg.hashsalt": "longhelix", "font.size": 9, "axes.formatter.min_exponent": 4}


def require() -> None:
    """Raise UserError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "figures need matplotlib, which is not installed: run pip install 'longhelix[plan]'", "missing_extra"
        )


def save(drawings: Iterable[Drawing], folder: Path) -> Iterator[Path]:
    """Write NAME.png and NAME.svg of each drawing into `folder`, and yield their paths.

    The same drawing always gives files with the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        for drawing in drawings:
            figure = Figure(figsize=drawing.size, layout="constrained")
            figure.suptitle(drawing.title)
            drawing.draw(figure)
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{drawing.name}.{suffix}"
                figure.savefig(path, dpi=_DPI, metadata=metadata)
                yield path
