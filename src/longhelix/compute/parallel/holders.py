"""Which ranks of a KVP group keep KV for which rows of a step, if not all ranks keep KV for all rows."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.spec.layout import split


class Holding(Protocol):
    """What attention and exchange need to know about T rows. Tensors are int64.

    Attributes:
        counts: Number of rows with which each rank attends.
        rows_t: The rows of this rank.
        places_NT: Place of each row among the rows of each rank. -1: the rank has no KV for the row.
        spans_N2: First row and number of rows of each rank, in the concatenated rows of all ranks.
    """

    counts: tuple[int, ...]
    rows_t: Tensor
    places_NT: Tensor
    spans_N2: Tensor

    def cut(self, parts: int) -> "list[tuple[slice, Holding]]":
        """Split the T rows evenly into `parts` ranges. Returns this rank's rows and the holders of each range."""
        ...


@dataclass(frozen=True)
class Holders:
    """The holders of a step.

    Attributes:
        index: Index of this rank in the group.
        held_NT: Whether each rank has KV for each row. At least one rank has.
        rows_t: The rows of this rank, in ascending order. Other fields are as in `Holding`.
    """

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
        """Return the maximum number of rows for which a rank has KV, over `parts` even ranges of `rows` rows.

        No rank has KV for rows beyond T.
        """
        return max(int(self.held_NT[:, part.start : part.stop].sum(axis=1).max()) for part in split(rows, parts))


@dataclass(frozen=True)
class PaddedHolders:
    """Holders with fixed sizes, because the exchanges of a CUDA graph always have the same sizes.

    In each of `parts` ranges, every rank has `size` rows. The last rows may be padding: copies of other rows that no
    rank uses. Places count from the start of the range.
    """

    parts: int
    size: int
    counts: tuple[int, ...]
    rows_t: Tensor
    places_NT: Tensor
    spans_N2: Tensor

    @classmethod
    def new(cls, ranks: int, rows: int, parts: int, size: int, device: torch.device) -> "PaddedHolders":
        """Return holders of `rows` rows for which no rank has KV."""
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
        """Overwrite by a step's holders. Returns the indices of this rank's rows among its rows and padding."""
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
            rows = slice(index * self.size, (index + 1) * self.size)
            piece = PaddedHolders(
                parts=1,
                size=self.size,
                counts=counts,
                rows_t=self.rows_t[rows],
                places_NT=self.places_NT[:, part.start : part.stop],
                spans_N2=self.spans_N2,
            )
            pieces.append((rows, piece))
        return pieces


def _places(held_NT: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.where(held_NT, held_NT.cumsum(axis=1) - 1, -1)


def _spans(counts: tuple[int, ...], device: torch.device) -> Tensor:
    counts_N = torch.tensor(counts, dtype=torch.int64)
    return torch.stack((counts_N.cumsum(0) - counts_N, counts_N), dim=1).to(device)
