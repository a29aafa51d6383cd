"""The decoder's layers for decode steps, on tapes: one tape for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longhelix.kernels.tape import Tape
from longhelix.models.batch import Batch
from longhelix.spans import UNTRACED, Spans

_MOST_TAPES = 16  # each keeps the activations of its rows


@dataclass(frozen=True)
class _Recorded:
    """A tape, the memory that it reads, the result that it writes, and the spans whose times it writes."""

    tape: Tape
    hidden_TH: Tensor
    batch: Batch
    result_TH: Tensor
    spans: tuple[object, ...]


class TapedLayers:
    """Runs steps whose sequences all have one row from tapes of `layers`, where that is possible.

    The first step of a kind runs op by op and is recorded. Later ones copy their few inputs over those of the first,
    and run its tape. Ranks may differ in what they can record; in either case they run the same collectives, once.
    """

    def __init__(self, layers: Callable[[Tensor, Batch], Tensor], spans: Spans = UNTRACED) -> None:
        self._layers = layers
        self._spans = spans
        self._tapes: dict[tuple[int, ...], _Recorded] = {}  # the one used last comes last
        self._possible = True

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """As `layers`; what it returns is overwritten by the next call."""
        if not self._possible or not batch.decodes or batch.shared:
            return self._layers(hidden_TH, batch)
        key = (len(hidden_TH), *(() if batch.holders is None else batch.holders.counts))
        recorded = self._tapes.pop(key, None)
        if recorded is None:
            return self._record(key, hidden_TH, batch)
        self._tapes[key] = recorded
        span = self._spans.begin("inputs", "host")
        recorded.hidden_TH.copy_(hidden_TH)
        for own, given in zip(_inputs(recorded.batch), _inputs(batch), strict=True):
            own.copy_(given)
        self._spans.end(span)
        self._spans.again(recorded.spans)
        recorded.tape.run()
        return recorded.result_TH

    def _record(self, key: tuple[int, ...], hidden_TH: Tensor, batch: Batch) -> Tensor:
        own = _own(batch)
        own_TH, tape, begun = hidden_TH.clone(), Tape(), self._spans.count()
        with tape:
            result_TH = self._layers(own_TH, own)
        if not tape.complete:
            self._possible = False
            return result_TH
        if len(self._tapes) == _MOST_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[key] = _Recorded(tape, own_TH, own, result_TH, self._spans.taped(begun))
        return result_TH


# The blocks are those of the arena, which stays where it is; all else is of this step.
_VARYING = ("cos_tR", "sin_tR", "slots_t", "limits_t", "row_starts_b", "extents_b2")


def _inputs(batch: Batch) -> list[Tensor]:
    holders = () if batch.holders is None else (batch.holders.rows_t, batch.holders.places_NT)
    return [*(getattr(batch, name) for name in _VARYING), *holders]


def _own(batch: Batch) -> Batch:
    """The same batch in memory of its own."""
    own = replace(batch, **{name: getattr(batch, name).clone() for name in _VARYING})
    if batch.holders is None:
        return own
    rows_t, places_NT = batch.holders.rows_t.clone(), batch.holders.places_NT.clone()
    return replace(own, holders=replace(batch.holders, rows_t=rows_t, places_NT=places_NT))
