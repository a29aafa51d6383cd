"""The decoder's layers for decode steps, on tapes: one for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor

from longhelix.kernels.tape import NotTapedError, Tape
from longhelix.models.batch import Batch

_MOST_TAPES = 16  # each keeps the activations of its rows


@dataclass(frozen=True)
class _Recorded:
    """A tape, the memory that it reads and what it leaves."""

    tape: Tape
    hidden_TH: Tensor
    batch: Batch
    result_TH: Tensor


class TapedLayers:
    """Runs `layers` for steps whose sequences all have one row from a tape, where that is possible.

    The first step of a kind runs as it is and is recorded; later ones copy their few inputs over those of the first.
    """

    def __init__(self, layers: Callable[[Tensor, Batch], Tensor]) -> None:
        self._layers = layers
        self._tapes: dict[tuple[int, ...], _Recorded] = {}
        self._possible = True

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """As `layers`; what it returns is overwritten by the next call."""
        if not self._possible or batch.num_sequences != len(hidden_TH):
            return self._layers(hidden_TH, batch)
        blocks = batch.blocks_BJ
        key = (len(hidden_TH), blocks.data_ptr(), blocks.stride(0), blocks.shape[1])
        recorded = self._tapes.get(key)
        if recorded is None:
            return self._record(key, hidden_TH, batch)
        recorded.hidden_TH.copy_(hidden_TH)
        for name in _VARYING:
            getattr(recorded.batch, name).copy_(getattr(batch, name))
        recorded.tape.run()
        return recorded.result_TH

    def _record(self, key: tuple[int, ...], hidden_TH: Tensor, batch: Batch) -> Tensor:
        own = replace(batch, **{name: getattr(batch, name).clone() for name in _VARYING})
        own_TH, tape = hidden_TH.clone(), Tape()
        try:
            with tape:
                result_TH = self._layers(own_TH, own)
        except NotTapedError:
            self._possible = False
            return self._layers(hidden_TH, batch)
        if len(self._tapes) == _MOST_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[key] = _Recorded(tape, own_TH, own, result_TH)
        return result_TH


# The blocks are those of the table, which stays where it is; all else is of this step.
_VARYING = [
    field.name for field in fields(Batch) if field.name not in ("blocks_BJ", "token_ids_T", "max_rows", "parts")
]
