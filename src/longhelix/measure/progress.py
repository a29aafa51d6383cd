"""What is told of points as they are measured."""

from collections.abc import Callable

from longhelix.measure.world import Row

# Of a point, what its line leaves out: all that is measured or counted.
_UNSHOWN = {"part", "flops", "read_bytes", "peak_rss_bytes", "formula_bytes"}


def by_name(tell: Callable[[str], None]) -> Callable[[str], Callable[[Row], None]]:
    """For each kind of measurement by name, a function that tells of a point's conditions in one line."""

    def of(name: str) -> Callable[[Row], None]:
        def on_point(row: Row) -> None:
            shown = (key for key, value in row.items() if isinstance(value, (str, int)) and key not in _UNSHOWN)
            tell(f"{name}: {', '.join(f'{key} {row[key]}' for key in shown)}")

        return on_point

    return of
