"""Draw line charts on a matplotlib figure. Callers pass the figure, so this module does not import matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longhelix.perf.layouts import Array


@dataclass(frozen=True)
class Curve:
    """One line of a panel."""

    label: str
    x: Array
    y: Array
    style: str = "o-"  # matplotlib format: color, marker and line

    @classmethod
    def of(cls, label: str, x: ArrayLike, y: ArrayLike, style: str = "o-") -> "Curve":
        return cls(label, np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), style)


@dataclass(frozen=True)
class Panel:
    """A plot of curves on one pair of axes."""

    title: str
    x: str  # label of the x axis
    y: str  # label of the y axis
    curves: Sequence[Curve]
    log: str = ""  # logarithmic axes: "", "x", "y" or "xy"
    limit: tuple[str, float] | None = None  # name and y value of a horizontal line, such as a target of the paper
    every_x: bool = False  # True if the x axis has a tick at each x value of the curves


@dataclass(frozen=True)
class Chart:
    """A figure that consists of one row of panels."""

    name: str  # file name, without a suffix
    title: str
    panels: Sequence[Panel]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        return 1.2 + 4.6 * len(self.panels), 4.2

    def draw(self, figure: Any) -> None:
        for panel, axes in zip(self.panels, figure.subplots(1, len(self.panels), squeeze=False)[0], strict=True):
            _draw(panel, axes)


def _draw(panel: Panel, axes: Any) -> None:
    for curve in panel.curves:
        axes.plot(curve.x, curve.y, curve.style, label=curve.label, markersize=4)
    if panel.limit is not None:
        name, level = panel.limit
        axes.axhline(level, color="gray", linestyle=":", label=name)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.set_xscale("log" if "x" in panel.log else "linear")
    axes.set_yscale("log" if "y" in panel.log else "linear")
    if panel.every_x:
        ticks = sorted({float(x) for curve in panel.curves for x in curve.x})
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
