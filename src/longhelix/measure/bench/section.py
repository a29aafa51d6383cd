"""Tables of measurements and plots of these tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.measure.world import Row


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    key: str  # key of the value in a row
    title: str
    format: str = ""  # format specification; empty for text
    factor: float = 1  # factor from the unit in the row to the unit in the title

    def show(self, row: Row) -> str:
        """Format the value of a row. The text is empty if the row has no such value."""
        value = row.get(self.key)
        if value is None:
            return ""
        return str(value) if not self.format else format(value * self.factor, self.format)


@dataclass(frozen=True)
class Plot:
    """Plot of a table: one line or bar for each of `y` and each combination of values of `series`."""

    y: tuple[str, ...]  # keys of columns
    series: tuple[str, ...]  # keys of columns
    x: str | None = None  # key of a column; None draws bars


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
        """Return the column with a key."""
        return next(column for column in self.columns if column.key == key)
