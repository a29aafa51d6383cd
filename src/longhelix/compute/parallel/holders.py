"""Which ranks of a KVP group hold KV for which rows of a step, where not all ranks hold KV for all rows."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.spec.layout import split


class Holding(Protocol):
    """What attention and exchange ask of T rows that ranks hold KV for.

    counts: how many rows each rank attends with. rows_t: those of this rank. places_NT: the place of a row among the
    rows of each rank, -1 if that rank has no KV for it. spans_N2: the first row of each rank where the rows of all
    ranks lie side by side, and its count. All int64.
    """

    counts: tuple[int, ...]
    rows_t: Tensor
    places_NT: Tensor
    spans_N2: Tensor

    def cut(self, parts: int) -> "list[tuple[slice, Holding]]":
        """For each of `parts` ranges of the T rows, as even as can be: which of this rank's rows lie in it, and who
        holds KV for those of the range."""
        ...


@dataclass(frozen=True)
class Holders:
    """As a step says it. index: that of this rank in the group. held_NT: whether a rank has KV for a row; at least one
    rank has. rows_t is ascending."""

    index: int
    held_NT: NDArray[np.bool_]
    counts: tuple[int, ...]
    rows_t: Tensor
    places_NT: Tensor
    spans_N2: Tensor

    @classmethod
    def of(cls, held_NT: NDArray[np.bool_], index: int, device: torch.device) -> "Holders":
        counts = tuple(held_NT.sum(axis=1).tolist())
        rows_t = torch.from_numpy(held_NT[index].nonzero()[0]).to(device)
        places_NT = torch.from_numpy(_places(held_NT)).to(device)
        return cls(
            index=index,
            held_NT=held_NT,
            counts=counts,
            rows_t=rows_t,
            places_NT=places_NT,
            spans_N2=_spans(counts, device),
        )

    def cut(self, parts: int) -> list[tuple[slice, Holding]]:
        pieces: list[tuple[slice, Holding]] = []
        start = 0
        for part in split(self.held_NT.shape[1], parts):
            piece = self.of(self.held_NT[:, part.start : part.stop], self.index, self.rows_t.device)
            stop = start + piece.counts[self.index]
            pieces.append((slice(start, stop), piece))
            start = stop
        return pieces

    def most_rows(self, rows: int, parts: int) -> int:
        """The most rows that any rank holds KV for in one of `parts` ranges of as many `rows`, of which those beyond T
        are nobody's."""
        return max(int(self.held_NT[:, part.start : part.stop].sum(axis=1).max()) for part in split(rows, parts))


@dataclass(frozen=True)
class PaddedHolders:
    """Of sizes that all ranks know, whoever holds what: for graphs, whose exchanges are always of the same sizes.

    In each of `parts` ranges every rank has `size` rows, of which the last ones may be padding: another row once more,
    that nobody looks for. Places are counted within the range.
    """

    parts: int
    size: int
    counts: tuple[int, ...]
    rows_t: Tensor
    places_NT: Tensor
    spans_N2: Tensor

    @classmethod
    def new(cls, ranks: int, rows: int, parts: int, size: int, device: torch.device) -> "PaddedHolders":
        """Of `rows` that nobody holds KV for."""
        rows_t = torch.zeros(parts * size, dtype=torch.int64, device=device)
        places_NT = torch.full((ranks, rows), -1, dtype=torch.int64, device=device)
        return cls(
            parts=parts,
            size=size,
            counts=(parts * size,) * ranks,
            rows_t=rows_t,
            places_NT=places_NT,
            spans_N2=_spans((size,) * ranks, device),
        )

    def fill(self, holders: Holders) -> Tensor:
        """Take over a step's holders. Returns where the rows of this rank are now among its own and the padding."""
        ranks, rows = self.places_NT.shape
        held_NT = np.zeros((ranks, rows), dtype=np.bool_)
        held_NT[:, : holders.held_NT.shape[1]] = holders.held_NT
        ranges = split(rows, self.parts)
        places_NT = np.concatenate([_places(held_NT[:, part.start : part.stop]) for part in ranges], axis=1)
        first_T = np.repeat(np.arange(self.parts) * self.size, [len(part) for part in ranges])
        held_t = held_NT[holders.index].nonzero()[0]
        at_t = (first_T + places_NT[holders.index])[held_t]
        rows_t = np.zeros(self.parts * self.size, dtype=np.int64)
        rows_t[at_t] = held_t
        self.rows_t.copy_(torch.from_numpy(rows_t))
        self.places_NT.copy_(torch.from_numpy(places_NT))
        return torch.from_numpy(at_t).to(self.rows_t.device)

    def cut(self, parts: int) -> list[tuple[slice, Holding]]:
        assert parts == self.parts
        if parts == 1:
            return [(slice(0, self.size), self)]
        ranges, counts = split(self.places_NT.shape[1], parts), (self.size,) * len(self.counts)
        pieces: list[tuple[slice, Holding]] = []
        for index, part in enumerate(ranges):
            own = slice(index * self.size, (index + 1) * self.size)
            piece = PaddedHolders(
                parts=1,
                size=self.size,
                counts=counts,
                rows_t=self.rows_t[own],
                places_NT=self.places_NT[:, part.start : part.stop],
                spans_N2=self.spans_N2,
            )
            pieces.append((own, piece))
        return pieces


def _places(held_NT: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.where(held_NT, held_NT.cumsum(axis=1) - 1, -1)


def _spans(counts: tuple[int, ...], device: torch.device) -> Tensor:
    counts_N = torch.tensor(counts, dtype=torch.int64)
    return torch.stack((counts_N.cumsum(0) - counts_N, counts_N), dim=1).to(device)
