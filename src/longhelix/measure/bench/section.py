"""Tables of measurements, and the plots of these tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.measure.world import Row


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    key: str  # key of the value in a row
    title: str
    format: str = ""  # format specification; empty for text
    factor: float = 1  # converts from the unit of the row to the unit in the title

    def show(self, row: Row) -> str:
        """Format the value of a row. The text is empty if the row has no such value."""
        value = row.get(self.key)
        if value is None:
            return ""
        return str(value) if not self.format else format(value * self.factor, self.format)


@dataclass(frozen=True)
class Plot:
    """Plot of a table, with one line or bar per column in `y` and per combination of values of the `series` columns."""

    y: tuple[str, ...]  # keys of columns
    series: tuple[str, ...]  # keys of columns
    x: str | None = None  # key of a column; None draws bars instead of lines


@dataclass(frozen=True)
class Section:
    """A table of a report."""

    name: str  # key of the table in JSON
    title: str
    note: str  # how the numbers were measured
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    plot: Plot | None = None

    def column(self, key: str) -> Column:
        """Return the column that has the key `key`."""
        return next(column for column in self.columns if column.key == key)
