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
        holders = batch.sharding.holders
        if holders is not self.holders:
            self.own_holders.rows_t.copy_(holders.rows_t)
            self.own_holders.places_NT.copy_(holders.places_NT)
            self.holders = holders


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
        holders = batch.sharding.holders
        key = (len(hidden_TH), *(() if holders is None else holders.counts))
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
        self._tapes[key] = _Recorded(
            tape=tape,
            hidden_TH=own_TH,
            inputs=_inputs(own),
            own_holders=own.sharding.holders,
            holders=batch.sharding.holders,
            result_TH=result_TH,
            spans=spans,
        )
        return result_TH


def _inputs(batch: Batch) -> list[Tensor]:
    """What differs between steps: all but the blocks, which are those of the arena and stay where they are."""
    rows = batch.attention
    of_views = [tensor for view in rows.views for tensor in (view.slots_t, view.firsts_t) if tensor is not None]
    of_rotations = [tensor for rotation in rows.rotations for tensor in rotation]
    return [rows.row_starts_b, rows.limits_t, rows.extents_b2, *of_rotations, *of_views]


def _own(batch: Batch) -> Batch:
    """The same batch in memory that stays."""
    rows, holders = batch.attention, batch.sharding.holders
    if not rows.stays:
        rows = replace(
            rows,
            row_starts_b=rows.row_starts_b.clone(),
            limits_t=rows.limits_t.clone(),
            extents_b2=rows.extents_b2.clone(),
            rotations=tuple(RowRotation(each.cos_tR.clone(), each.sin_tR.clone()) for each in rows.rotations),
            views=tuple(map(_own_view, rows.views)),
        )
    if holders is not None:
        holders = replace(holders, rows_t=holders.rows_t.clone(), places_NT=holders.places_NT.clone())
    return replace(batch, attention=rows, sharding=replace(batch.sharding, holders=holders))


def _own_view(view: RowView) -> RowView:
    firsts_t = None if view.firsts_t is None else view.firsts_t.clone()
    return RowView(view.slots_t.clone(), view.blocks_X, firsts_t)
