"""The decoder's layers for decode steps, on tapes: one tape for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longhelix.compute.kernels.tape import Tape
from longhelix.compute.models.batch import Batch, RowRotation, RowView
from longhelix.compute.parallel.holders import Holders
from longhelix.spans import UNTRACED, Spans

_MOST_TAPES = 16  # each keeps the activations of its rows


@dataclass
class _Recorded:
    """A tape, the memory that it reads, the result that it writes, and the spans whose times it writes. holders: those
    of the step that ran last, which its memory has."""

    tape: Tape
    hidden_TH: Tensor
    inputs: list[Tensor]
    own_holders: Holders | None
    holders: Holders | None
    result_TH: Tensor
    spans: tuple[object, ...]

    def take(self, hidden_TH: Tensor, batch: Batch) -> None:
        """Take over a step."""
        self.hidden_TH.copy_(hidden_TH)
        for own, given in zip(self.inputs, _inputs(batch), strict=True):
            if own is not given:
                own.copy_(given)
        if batch.holders is not self.holders:
            self.own_holders.rows_t.copy_(batch.holders.rows_t)
            self.own_holders.places_NT.copy_(batch.holders.places_NT)
            self.holders = batch.holders


class TapedLayers:
    """Runs steps whose sequences all have one row from tapes of `layers`, where that is possible.

    The first step of a kind runs op by op and is recorded. Later ones write their few inputs over those of the first,
    and run its tape. Ranks may differ in what they can record; in either case they run the same collectives, once.
    """

    def __init__(self, layers: Callable[[Tensor, Batch], Tensor], spans: Spans = UNTRACED) -> None:
        self._layers = layers
        self._spans = spans
        self._tapes: dict[tuple[int, ...], _Recorded] = {}  # the one used last comes last
        self._possible = True

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """As `layers`; what it returns is overwritten by the next call."""
        if not self._possible or not batch.decodes or batch.alone:
            return self._layers(hidden_TH, batch)
        key = (len(hidden_TH), *(() if batch.holders is None else batch.holders.counts))
        recorded = self._tapes.pop(key, None)
        if recorded is None:
            return self._record(key, hidden_TH, batch)
        self._tapes[key] = recorded
        span = self._spans.begin("inputs", "host")
        recorded.take(hidden_TH, batch)
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
        spans = self._spans.taped(begun)
        self._tapes[key] = _Recorded(tape, own_TH, _inputs(own), own.holders, batch.holders, result_TH, spans)
        return result_TH


# The blocks are those of the arena, which stays where it is; all else is of this step.
_VARYING = ("slots_t", "limits_t", "row_starts_b", "extents_b2")


def _inputs(batch: Batch) -> list[Tensor]:
    of_rotations = (tensor for rotation in batch.rotations for tensor in rotation)
    of_views = (tensor for view in batch.views for tensor in (view.firsts_t, view.slots_t))
    return [*(getattr(batch, name) for name in _VARYING), *of_rotations, *of_views]


def _own(batch: Batch) -> Batch:
    """The same batch in memory that stays."""
    own = batch
    if not batch.stays:
        views = tuple(RowView(view.firsts_t.clone(), view.slots_t.clone(), view.blocks_X) for view in batch.views)
        rotations = tuple(RowRotation(each.cos_tR.clone(), each.sin_tR.clone()) for each in batch.rotations)
        varying = {name: getattr(batch, name).clone() for name in _VARYING}
        own = replace(batch, rotations=rotations, views=views, **varying)
    if batch.holders is None:
        return own
    rows_t, places_NT = batch.holders.rows_t.clone(), batch.holders.places_NT.clone()
    return replace(own, holders=replace(batch.holders, rows_t=rows_t, places_NT=places_NT))
