"""The decoding sequences of a microbatch."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longhelix.compute.runner.adjustments import Record
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import Frequencies, SequenceState


class DecodeRows:
    """Sequences with one row each in every step of a microbatch, in the order of the rows. Iterates over their ids.

    Properties are cached until a sequence joins or leaves.
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
        """Remove a sequence, if it is in this microbatch."""
        if self._by_id.pop(sequence_id, None) is not None:
            self._forget()

    def _forget(self) -> None:
        for name in ("sequences", "lines", "lines_address", "records", "frequencies"):
            self.__dict__.pop(name, None)

    @cached_property
    def sequences(self) -> tuple[SequenceState, ...]:
        """All sequences. The same object until one joins or leaves."""
        return tuple(self._by_id.values())

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """Lines of the sequences in the table of numbers, lines_B."""
        return np.array([seq.line for seq in self.sequences], np.int64)

    @cached_property
    def lines_address(self) -> int:
        return self.lines.ctypes.data

    @cached_property
    def records(self) -> tuple[tuple[SequenceState, SeenTokens | Record], ...]:
        """Pairs of a sequence and a record. Its last token is added to the record before each row."""
        return tuple((seq, record) for seq in self.sequences for record in seq.records)

    @cached_property
    def frequencies(self) -> frozenset[Frequencies]:
        """The distinct frequencies of all sequences."""
        return frozenset(seq.frequencies for seq in self.sequences)
