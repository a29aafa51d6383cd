"""Draw frontiers in a terminal: one mark per strategy, on logarithmic axes."""

import math
from collections.abc import Iterator

import numpy as np
from rich.text import Text

from longhelix.perf.layouts import Array
from longhelix.plan.pareto import Series
from longhelix.plan.space import STRATEGIES

_MARKS = {
    "tp": ("t", "red"),
    "dp_ep": ("e", "green"),
    "dp_tp": ("d", "yellow"),
    "tied": ("m", "magenta"),
    "helix_exposed": ("x", "cyan"),
    "helix": ("H", "bold blue"),
    "helix_dp": ("G", "bright_blue"),
}
_TARGET = ("|", "dim")
_MARGIN = 8


class _Axis:
    """A logarithmic axis over a number of character cells."""

    def __init__(self, numbers: Array, cells: int) -> None:
        self._least = math.log10(numbers.min())
        self._span = max(math.log10(numbers.max()) - self._least, 0.1)
        self._cells = cells

    def cell(self, number: float) -> int:
        """Return the cell of a number. Numbers outside the axis have a cell below 0 or past the last cell."""
        return round((math.log10(number) - self._least) / self._span * (self._cells - 1))

    def ticks(self) -> dict[int, str]:
        """Return the labels of the round numbers on the axis, by cell."""
        first, last = math.floor(self._least), math.ceil(self._least + self._span)
        leading = (1, 2, 5) if self._span > 1 else range(1, 10)
        numbers = [times * 10.0**power for power in range(first, last + 1) for times in leading]
        return {self.cell(number): f"{number:g}" for number in numbers if 0 <= self.cell(number) < self._cells}


def draw_frontier(series: Series, *, ttl_s: float | None = None, width: int = 100, height: int = 25) -> Text:
    """Draw tokens/s/GPU against tokens/s/user in `width` x `height` characters.

    In cells where lines cross, only the mark of the later strategy is visible.

    Args:
        series: the frontier of each strategy, by title.
        ttl_s: TPOT target in seconds, drawn as a vertical line; None for no line.
    """
    drawn = {label: points for label, points in series.items() if len(points[0])}
    if not drawn:
        return Text("no configuration fits")
    rows, columns = height - 4, width - _MARGIN - 1
    x_axis = _Axis(np.concatenate([user for user, _ in drawn.values()]), columns)
    y_axis = _Axis(np.concatenate([gpu for _, gpu in drawn.values()]), rows)
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    if ttl_s is not None and 0 <= x_axis.cell(1 / ttl_s) < columns:
        cells |= {(row, x_axis.cell(1 / ttl_s)): _TARGET for row in range(rows)}
    marks = {strategy.title: _MARKS[strategy.name] for strategy in STRATEGIES}
    for label, (user, gpu) in drawn.items():
        for x, y in _joined([x_axis.cell(each) for each in user], [y_axis.cell(each) for each in gpu]):
            cells[y, x] = marks[label]
    text = Text("tokens/s per GPU against tokens/s per user\n", no_wrap=True)
    ticks = y_axis.ticks()
    for row in reversed(range(rows)):
        text.append(f"{ticks.get(row, ''):>{_MARGIN}}{'┤' if row in ticks else '│'}", "dim")
        for column in range(columns):
            text.append(*cells.get((row, column), (" ", "")))
        text.append("\n")
    text.append(_bottom(x_axis, columns), "dim")
    for label in drawn:
        text.append(*marks[label])
        text.append(f" {label}  ")
    return text


def _joined(xs: list[int], ys: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the cells (x, y) of a line through all points."""
    yield xs[0], ys[0]
    for x, y, next_x, next_y in zip(xs, ys, xs[1:], ys[1:], strict=False):
        steps = max(abs(next_x - x), abs(next_y - y))
        for step in range(1, steps + 1):
            yield x + round((next_x - x) * step / steps), y + round((next_y - y) * step / steps)


def _bottom(axis: _Axis, columns: int) -> str:
    """Return the x axis and its labels. A label starts below its tick, or further left if it would not fit."""
    line, numbers = ["─"] * columns, [" "] * columns
    for cell, number in axis.ticks().items():
        start = min(cell, columns - len(number))
        line[cell] = "┴"
        numbers[start : start + len(number)] = number
    return f"{' ' * _MARGIN}└{''.join(line)}\n{' ' * (_MARGIN + 1)}{''.join(numbers)}\n"
