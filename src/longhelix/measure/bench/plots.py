"""Draws the sections of a report as PNG files with matplotlib (the extra `bench`)."""

import importlib.util
from pathlib import Path

from longhelix.measure.bench.section import Column, Section
from longhelix.measure.world import Row


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(section: Section, report: Path) -> str:
    """Draw the plot of a section as a PNG file next to the report. Returns the name of the file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    (_bars if section.plot.x is None else _lines)(axes, section)
    axes.set_title(section.title)
    axes.grid(alpha=0.3)
    path = report.with_name(f"{report.stem}-{section.name}.png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path.name


def _lines(axes, section: Section) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    x, measured = section.column(section.plot.x), _measured(section)
    for label, rows in _series(section).items():
        for y in measured:
            points = sorted((row[x.key] * x.factor, row[y.key] * y.factor) for row in rows)
            named = label if len(measured) == 1 else f"{label}: {y.title}"
            axes.plot(*zip(*points, strict=True), marker="o", label=named)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted({row[x.key] * x.factor for row in section.rows}))
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel(x.title)
    axes.set_ylabel(_title(measured))
    axes.legend(fontsize="small")


def _bars(axes, section: Section) -> None:
    measured = _measured(section)
    for y in measured:
        values = {label: rows[0][y.key] * y.factor for label, rows in _series(section).items()}
        axes.barh(list(values), list(values.values()))
    axes.invert_yaxis()
    axes.set_xlabel(_title(measured))
    axes.set_ylabel(", ".join(section.column(key).title for key in section.plot.series))


def _measured(section: Section) -> list[Column]:
    return [section.column(key) for key in section.plot.y]


def _title(measured: list[Column]) -> str:
    return "; ".join(column.title for column in measured)


def _series(section: Section) -> dict[str, list[Row]]:
    """Group rows by the labels of the plot's series."""
    found: dict[str, list[Row]] = {}
    for row in section.rows:
        found.setdefault(", ".join(str(row[key]) for key in section.plot.series), []).append(row)
    return found
