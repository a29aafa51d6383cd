"""Tables of what was measured, and how they are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.measure.world import Row


@dataclass(frozen=True)
class Column:
    """One column of a table: `key` of its rows, in the unit of the title: times `factor`."""

    key: str
    title: str
    format: str = ""
    factor: float = 1

    def show(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return ""
        return str(value) if not self.format else format(value * self.factor, self.format)


@dataclass(frozen=True)
class Plot:
    """A line of each of `y` over `x` for every combination of what `series` names; or, without an `x`, a bar."""

    y: tuple[str, ...]
    series: tuple[str, ...]
    x: str | None = None


@dataclass(frozen=True)
class Section:
    """One table: `name` is its key in JSON, `note` says how it was measured."""

    name: str
    title: str
    note: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    plot: Plot | None = None

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)
