"""The sequences that decode."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longhelix.compute.runner.adjustments import Record
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import Frequencies, SequenceState


class DecodeRows:
    """Sequences with one row each in every step of a microbatch, in the order of the rows. Iterates over their ids.

    What is said of all of them is found when one joins or leaves, and kept.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def join(self, seq: SequenceState) -> None:
        self._by_id[seq.new.id] = seq
        self._forget()

    def leave(self, sequence_id: int) -> None:
        """Take a sequence out, if it is one of these."""
        if self._by_id.pop(sequence_id, None) is not None:
            self._forget()

    def _forget(self) -> None:
        for name in ("sequences", "lines", "lines_address", "records", "frequencies"):
            self.__dict__.pop(name, None)

    @cached_property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The same object while the sequences are the same."""
        return tuple(self._by_id.values())

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """lines_B: where their numbers are."""
        return np.array([seq.line for seq in self.sequences], np.int64)

    @cached_property
    def lines_address(self) -> int:
        return self.lines.ctypes.data

    @cached_property
    def records(self) -> tuple[tuple[SequenceState, SeenTokens | Record], ...]:
        """What is told of every token of a sequence, before its row."""
        return tuple((seq, record) for seq in self.sequences for record in seq.records)

    @cached_property
    def frequencies(self) -> frozenset[Frequencies]:
        """The different ones."""
        return frozenset(seq.frequencies for seq in self.sequences)
