"""Runs the decoder's layers in decode steps from tapes, one for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longhelix.compute.kernels.tape import Tape
from longhelix.compute.models.batch import Batch, RowRotation, RowView
from longhelix.compute.parallel.holders import Holders
from longhelix.spans import UNTRACED, Spans

_MOST_TAPES = 16  # each keeps the activations of its rows


@dataclass
class _RecordedStep:
    """A tape with the memory that it reads and writes."""

    tape: Tape
    hidden_TH: Tensor
    inputs: list[Tensor]
    tape_holders: Holders | None  # the tape reads their tensors
    holders: Holders | None  # those of the last step: `tape_holders` has their values
    result_TH: Tensor
    spans: tuple[object, ...]  # the tape writes their times

    def fill(self, hidden_TH: Tensor, batch: Batch) -> None:
        """Copy the inputs of a step into the tape's memory."""
        self.hidden_TH.copy_(hidden_TH)
        for memory, values in zip(self.inputs, _inputs(batch), strict=True):
            if memory is not values:
                memory.copy_(values)
        holders = batch.sharding.holders
        if holders is not self.holders:
            self.tape_holders.rows_t.copy_(holders.rows_t)
            self.tape_holders.places_NT.copy_(holders.places_NT)
            self.holders = holders


class TapedLayers:
    """Runs decode steps from tapes of `layers`, if they can be recorded.

    The first step of a kind runs op by op and is recorded. Later steps overwrite its inputs, and run its tape. Some
    ranks may record and others not, because both ways run the same collectives once.
    """

    def __init__(self, layers: Callable[[Tensor, Batch], Tensor], spans: Spans = UNTRACED) -> None:
        self._layers = layers
        self._spans = spans
        self._tapes: dict[tuple[int, ...], _RecordedStep] = {}  # ordered by last use
        self._can_record = True

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """Run the layers. The next call overwrites the result."""
        if not self._can_record or not batch.decodes or batch.runs_op_by_op:
            return self._layers(hidden_TH, batch)
        holders = batch.sharding.holders
        key = (len(hidden_TH), *(() if holders is None else holders.counts))
        recorded = self._tapes.pop(key, None)
        if recorded is None:
            return self._record(key, hidden_TH, batch)
        self._tapes[key] = recorded
        span = self._spans.begin("inputs", "host")
        recorded.fill(hidden_TH, batch)
        self._spans.end(span)
        self._spans.again(recorded.spans)
        recorded.tape.run()
        return recorded.result_TH

    def _record(self, key: tuple[int, ...], hidden_TH: Tensor, batch: Batch) -> Tensor:
        reusable = _reusable(batch)
        input_TH, tape, first_span = hidden_TH.clone(), Tape(), self._spans.count()
        with tape:
            result_TH = self._layers(input_TH, reusable)
        if not tape.complete:
            self._can_record = False
            return result_TH
        if len(self._tapes) == _MOST_TAPES:
            del self._tapes[next(iter(self._tapes))]
        spans = self._spans.taped(first_span)
        self._tapes[key] = _RecordedStep(
            tape=tape,
            hidden_TH=input_TH,
            inputs=_inputs(reusable),
            tape_holders=reusable.sharding.holders,
            holders=batch.sharding.holders,
            result_TH=result_TH,
            spans=spans,
        )
        return result_TH


def _inputs(batch: Batch) -> list[Tensor]:
    """Return the tensors that differ between steps: all except the blocks, which stay in the arena."""
    rows = batch.attention
    of_views = [tensor for view in rows.views for tensor in (view.slots_t, view.firsts_t) if tensor is not None]
    of_rotations = [tensor for rotation in rows.rotations for tensor in rotation]
    return [rows.row_starts_b, rows.limits_t, rows.extents_b2, *of_rotations, *of_views]


def _reusable(batch: Batch) -> Batch:
    """Return a copy of the batch in memory that later steps can reuse."""
    rows, holders = batch.attention, batch.sharding.holders
    if not rows.is_reused:
        rows = replace(
            rows,
            row_starts_b=rows.row_starts_b.clone(),
            limits_t=rows.limits_t.clone(),
            extents_b2=rows.extents_b2.clone(),
            rotations=tuple(
                RowRotation(rotation.cos_tR.clone(), rotation.sin_tR.clone()) for rotation in rows.rotations
            ),
            views=tuple(map(_copied_view, rows.views)),
        )
    if holders is not None:
        holders = replace(holders, rows_t=holders.rows_t.clone(), places_NT=holders.places_NT.clone())
    return replace(batch, attention=rows, sharding=replace(batch.sharding, holders=holders))


def _copied_view(view: RowView) -> RowView:
    firsts_t = None if view.firsts_t is None else view.firsts_t.clone()
    return RowView(view.slots_t.clone(), view.blocks_X, firsts_t)
