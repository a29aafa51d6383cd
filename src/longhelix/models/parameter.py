"""One parameter: its checkpoint tensors, their global shapes and a rank's slices. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor of `shape`, of which a rank keeps `slices` (one range per dim)."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A local tensor under the model's own name: its sources, one after the other along dim 0.

    `exact`: it keeps the checkpoint's dtype.
    """

    name: str
    sources: tuple[Source, ...]
    exact: bool = False

    @property
    def num_elements(self) -> int:
        total = 0
        for source in self.sources:
            size = 1
            for length in source.local_shape:
                size *= length
            total += size
        return total


def vector(name: str, source: str, length: int, *, exact: bool = False) -> Parameter:
    """The same on every rank."""
    return Parameter(name, (Source(source, (length,), (range(length),)),), exact)


def matrix(name: str, source: str, num_rows: int, rows: range, columns: range) -> Parameter:
    """Some rows of a matrix, all of its columns."""
    return Parameter(name, (Source(source, (num_rows, len(columns)), (rows, columns)),))


def sliced(name: str, source: str, num_rows: int, num_columns: int, columns: range) -> Parameter:
    """All rows of a matrix, some of its columns."""
    return Parameter(name, (Source(source, (num_rows, num_columns), (range(num_rows), columns)),))


def stacked(name: str, parts: list[tuple[str, int, range]], columns: range | None = None) -> Parameter:
    """Sources stacked by rows: matrices with `columns`, or vectors without."""
    if columns is None:
        return Parameter(name, tuple(Source(source, (total,), (rows,)) for source, total, rows in parts))
    return Parameter(
        name, tuple(Source(source, (total, len(columns)), (rows, columns)) for source, total, rows in parts)
    )
