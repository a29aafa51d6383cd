"""Creates the progress lines of measurements."""

from collections.abc import Callable

from longhelix.measure.world import Row

# Keys of measured or counted values, which progress lines omit.
_UNSHOWN = {"part", "flops", "read_bytes", "peak_rss_bytes", "formula_bytes"}


def by_name(tell: Callable[[str], None]) -> Callable[[str], Callable[[Row], None]]:
    """Return a function that maps the name of a measurement to a callback for rows.

    For each row, the callback calls `tell` with one line: the name of the measurement and the conditions of the row.
    """

    def of(name: str) -> Callable[[Row], None]:
        def on_point(row: Row) -> None:
            shown = (key for key, value in row.items() if isinstance(value, (str, int)) and key not in _UNSHOWN)
            tell(f"{name}: {', '.join(f'{key} {row[key]}' for key in shown)}")

        return on_point

    return of
