"""The decoder's layers as CUDA graphs: one graph for each bucket of step shapes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from longhelix.compute.kernels.flashinfer import PageLists
from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowSharding, RowView, StepShape
from longhelix.compute.parallel.holders import PaddedHolders
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.parallel.traffic import Traffic
from longhelix.scheduler.kv.splits import length_bucket
from longhelix.spec import ModelSpec
from longhelix.spec.weights import num_active_parameters

_MOST_GRAPHS = 128
# Time in which the host launches one layer op by op, and arithmetic of a GPU. Both measured on an H200.
_LAUNCH_LAYER_S = 1e-3
_FLOPS_PER_S = 6e14


def most_graph_rows(spec: ModelSpec, num_ranks: int) -> int:
    """Rows from which a GPU takes longer to compute a layer than the host takes to launch it, so a graph gains nothing.

    num_ranks: ranks that share a layer. The result depends on nothing else, so it is the same on all of them.
    """
    layer_flops_per_row = 2 * num_active_parameters(spec) / (spec.num_layers * num_ranks)
    return math.ceil(_LAUNCH_LAYER_S * _FLOPS_PER_S / layer_flops_per_row)


# Runs a call, and returns its result and a function that runs it again on the same memory.
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class Bucket(NamedTuple):
    """A shape that steps are padded to.

    Capturing a new bucket runs the layers once more, with all their collectives, so all ranks must choose the same
    bucket. It therefore depends only on the step.

    Attributes:
        rows: Number of rows.
        sequences: Number of sequences.
        max_rows: Maximum number of rows of one sequence.
        most_tokens: As in `StepShape`.
        parts: As in `StepShape`.
        rows_per_part: Number of rows per part for which each rank keeps KV, as of the rank with the most. 0: all ranks
            keep KV for all rows.
    """

    rows: int
    sequences: int
    max_rows: int
    most_tokens: int
    parts: int
    rows_per_part: int = 0

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the bucket of a batch.

        In decode steps, each padding row is a sequence. In other steps, one more sequence has all padding rows.
        """
        rows, most_tokens = padded(len(batch.token_ids_T)), length_bucket(batch.shape.most_tokens)
        parts, holders = batch.shape.parts, batch.sharding.holders
        rows_per_part = 0 if holders is None else padded(holders.most_rows(rows, parts))
        attention_rows = rows if not rows_per_part else parts * rows_per_part
        return cls(
            rows=rows,
            sequences=attention_rows if batch.decodes else padded(batch.shape.num_sequences + 1),
            max_rows=1 if batch.decodes else attention_rows,
            most_tokens=most_tokens,
            parts=parts,
            rows_per_part=rows_per_part,
        )

    @property
    def attention_rows(self) -> int:
        """The number of rows that attend on this rank, with padding."""
        return self.parts * self.rows_per_part if self.rows_per_part else self.rows


def padded(count: int) -> int:
    """Round up to a power of two, or to three quarters of one, so that at most a third is padding."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@dataclass(frozen=True)
class _Inputs:
    """The memory that a graph reads."""

    hidden_TH: Tensor
    batch: Batch

    @classmethod
    def new(cls, bucket: Bucket, hidden_TH: Tensor, batch: Batch) -> Self:
        holders, rows, device = batch.sharding.holders, batch.attention, hidden_TH.device
        if holders is not None:
            ranks = len(holders.counts)
            holders = PaddedHolders.new(ranks, bucket.rows, bucket.parts, bucket.rows_per_part, device)
        attention_rows = bucket.attention_rows
        graph_batch = Batch(
            token_ids_T=batch.token_ids_T.new_zeros(bucket.rows),
            shape=StepShape(
                num_sequences=bucket.rows if bucket.max_rows == 1 else bucket.sequences,
                most_tokens=bucket.most_tokens,
                parts=bucket.parts,
            ),
            attention=AttentionRows(
                row_starts_b=rows.row_starts_b.new_empty(bucket.sequences + 1),
                limits_t=rows.limits_t.new_empty(attention_rows),
                extents_b2=rows.extents_b2.new_empty(bucket.sequences, 2),
                max_rows=bucket.max_rows,
                rotations=tuple(
                    RowRotation(*(tensor.new_zeros(attention_rows, tensor.shape[1]) for tensor in rotation))
                    for rotation in rows.rotations
                ),
                views=tuple(_empty_view(view, attention_rows) for view in rows.views),
            ),
            sharding=RowSharding(holders=holders, shared=batch.sharding.shared),
            padding_T=torch.ones(bucket.rows, dtype=torch.bool, device=device),
        )
        return cls(hidden_TH.new_zeros(bucket.rows, hidden_TH.shape[1]), graph_batch)

    def fill(self, hidden_TH: Tensor, batch: Batch) -> None:
        """Write a step and its padding. Padding rows take no expert, write no KV and see no token."""
        target, rows, holders = self.batch.attention, batch.attention, self.batch.sharding.holders
        sequences = len(rows.extents_b2)
        self.hidden_TH[: len(hidden_TH)] = hidden_TH
        self.batch.padding_T.fill_(True)[: len(hidden_TH)] = False
        if holders is None:
            at_t = torch.arange(len(hidden_TH), device=hidden_TH.device)
        else:
            at_t = holders.fill(batch.sharding.holders)
        for target_rotation, rotation in zip(target.rotations, rows.rotations, strict=True):
            target_rotation.cos_tR[at_t] = rotation.cos_tR
            target_rotation.sin_tR[at_t] = rotation.sin_tR
        target.limits_t.zero_()[at_t] = rows.limits_t
        for target_view, view in zip(target.views, rows.views, strict=True):
            target_view.slots_t.fill_(-1)[at_t] = view.slots_t
            if view.firsts_t is not None:
                target_view.firsts_t.zero_()[at_t] = view.firsts_t
        target.extents_b2.zero_()
        if target.max_rows == 1:
            target.extents_b2[at_t] = rows.extents_b2
            torch.arange(len(target.limits_t) + 1, out=target.row_starts_b)
            return
        target.extents_b2[:sequences] = rows.extents_b2
        target.row_starts_b.fill_(len(target.limits_t))
        target.row_starts_b[:1] = 0
        # Padding between the rows of two sequences belongs to the second sequence.
        target.row_starts_b[1 : sequences + 1] = at_t[rows.row_starts_b[1:] - 1] + 1


def _empty_view(view: RowView, rows: int) -> RowView:
    """Allocate memory for `rows` rows of a KV group. The blocks are those of the arena, which never moves."""
    firsts_t = None if view.firsts_t is None else view.firsts_t.new_empty(rows)
    return RowView(view.slots_t.new_empty(rows), view.blocks_X, firsts_t)


@dataclass(frozen=True)
class _Graph:
    inputs: _Inputs
    result_TH: Tensor
    replay: Callable[[], None]
    traffic: list[Traffic]


class GraphedLayers:
    """Runs `layers` from CUDA graphs: captures one step of a bucket, and replays it with the inputs of later steps.

    A bucket of decodes is captured in its first step. A bucket with chunks is captured in its second step, because most
    of them occur once, and a capture costs several runs of the layers.

    Args:
        layers: The layers as one function.
        mesh: Its groups count the collectives of each replay, which are those of the capture.
        most_rows: Steps with more rows are never captured (`most_graph_rows`).
        page_lists: FlashInfer's page lists, prepared before each capture and replay.
        capture: Captures a call. Default: a CUDA graph.
    """

    def __init__(
        self,
        layers: Callable[[Tensor, Batch], Tensor],
        mesh: Mesh,
        most_rows: int,
        page_lists: PageLists | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._layers = layers
        self._mesh = mesh
        self._most_rows = most_rows
        self._page_lists = page_lists
        self._capture = capture or _CudaCapture()
        # Ordered by last use, equally on all ranks. The first is dropped first.
        self._graphs: dict[Bucket, _Graph] = {}
        self._seen_buckets: set[Bucket] = set()

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """Run the layers. The next call overwrites the result."""
        if batch.runs_op_by_op or batch.sharding.token_shards is not None or len(hidden_TH) > self._most_rows:
            return self._layers(hidden_TH, batch)
        bucket = Bucket.of(batch)
        graph = self._graphs.pop(bucket, None)
        if graph is None and bucket.max_rows > 1 and bucket not in self._seen_buckets:
            self._seen_buckets.add(bucket)
            return self._layers(hidden_TH, batch)
        if graph is None:
            graph = self._new_graph(bucket, hidden_TH, batch)
        else:
            self._fill(graph.inputs, hidden_TH, batch)
            for group, traffic in zip(self._mesh.groups, graph.traffic, strict=False):  # other groups are newer
                group.count(traffic)
        self._graphs[bucket] = graph
        graph.replay()
        return graph.result_TH[: len(hidden_TH)]

    def _new_graph(self, bucket: Bucket, hidden_TH: Tensor, batch: Batch) -> _Graph:
        if len(self._graphs) == _MOST_GRAPHS:
            unused = self._graphs.pop(next(iter(self._graphs)))
            if self._page_lists is not None:
                self._page_lists.forget(unused.inputs.batch.attention.limits_t)
        inputs = _Inputs.new(bucket, hidden_TH, batch)
        self._fill(inputs, hidden_TH, batch)
        traffic: list[Traffic] = []

        def call() -> Tensor:
            before = self._mesh.traffic
            result_TH = self._layers(inputs.hidden_TH, inputs.batch)
            traffic[:] = (now.since(then) for now, then in zip(self._mesh.traffic, before, strict=True))
            return result_TH

        # A capture may run the layers. As padding, its rows are not counted by the experts.
        inputs.batch.padding_T.fill_(True)
        result_TH, replay = self._capture(call)
        inputs.batch.padding_T[: len(hidden_TH)] = False
        return _Graph(inputs, result_TH, replay, traffic)

    def _fill(self, inputs: _Inputs, hidden_TH: Tensor, batch: Batch) -> None:
        inputs.fill(hidden_TH, batch)
        if self._page_lists is not None:
            rows = inputs.batch.attention
            self._page_lists.prepare(rows.views[0].blocks_X, rows.extents_b2, rows.limits_t, rows.max_rows)


class _CudaCapture:
    """Captures CUDA graphs. They share one memory pool, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        # Kernels must be compiled and libraries must allocate buffers before the capture, which allows neither.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile NCCL's watchdog queries events on another thread.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()
        return result, graph.replay
