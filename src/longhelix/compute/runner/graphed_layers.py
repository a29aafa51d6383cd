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
# Time that the host takes to launch one layer op by op, and arithmetic of a GPU, both as measured on an H200.
_LAUNCH_LAYER_S = 1e-3
_FLOPS_PER_S = 6e14


def most_graph_rows(spec: ModelSpec, num_ranks: int) -> int:
    """Rows from which a GPU takes longer to compute a layer than the host takes to launch it, so a graph gains nothing.

    num_ranks: ranks that share a layer. The result depends on nothing else, so it is the same on all of them.
    """
    layer_flops_per_row = 2 * num_active_parameters(spec) / (spec.num_layers * num_ranks)
    return math.ceil(_LAUNCH_LAYER_S * _FLOPS_PER_S / layer_flops_per_row)


# Gives what a call returns, and how to run it again over the same memory.
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class Bucket(NamedTuple):
    """A shape that steps are padded to: how many rows, sequences and rows per sequence, `most_tokens` and `parts`; and
    `held`, how many rows each rank holds KV for in each part, or 0 if all ranks do for all rows.

    Capturing a new bucket runs the layers once more, with all their collectives, so all ranks must come to the same
    bucket. It therefore depends on the step alone, and `held` on the rank that holds most.
    """

    rows: int
    sequences: int
    max_rows: int
    most_tokens: int
    parts: int
    held: int = 0

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """In decode steps every sequence has one row, and so has the padding. In other steps one more sequence takes
        all rows of the padding."""
        rows, most_tokens = padded(len(batch.token_ids_T)), length_bucket(batch.shape.most_tokens)
        parts, holders = batch.shape.parts, batch.sharding.holders
        held = 0 if holders is None else padded(holders.most_rows(rows, parts))
        own_rows = rows if not held else parts * held
        return cls(
            rows=rows,
            sequences=own_rows if batch.decodes else padded(batch.shape.num_sequences + 1),
            max_rows=1 if batch.decodes else own_rows,
            most_tokens=most_tokens,
            parts=parts,
            held=held,
        )

    @property
    def own_rows(self) -> int:
        """How many rows attention takes."""
        return self.parts * self.held if self.held else self.rows


def padded(count: int) -> int:
    """The next power of two, or three quarters of it, so that at most a third is padding."""
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
            holders = PaddedHolders.new(ranks, bucket.rows, bucket.parts, bucket.held, device)
        own_rows = bucket.own_rows
        own = Batch(
            token_ids_T=batch.token_ids_T.new_zeros(bucket.rows),
            shape=StepShape(
                num_sequences=bucket.rows if bucket.max_rows == 1 else bucket.sequences,
                most_tokens=bucket.most_tokens,
                parts=bucket.parts,
            ),
            attention=AttentionRows(
                row_starts_b=rows.row_starts_b.new_empty(bucket.sequences + 1),
                limits_t=rows.limits_t.new_empty(own_rows),
                extents_b2=rows.extents_b2.new_empty(bucket.sequences, 2),
                max_rows=bucket.max_rows,
                rotations=tuple(
                    RowRotation(*(tensor.new_zeros(own_rows, tensor.shape[1]) for tensor in rotation))
                    for rotation in rows.rotations
                ),
                views=tuple(_empty_view(view, own_rows) for view in rows.views),
            ),
            sharding=RowSharding(holders=holders, shared=batch.sharding.shared),
            padding_T=torch.ones(bucket.rows, dtype=torch.bool, device=device),
        )
        return cls(hidden_TH.new_zeros(bucket.rows, hidden_TH.shape[1]), own)

    def fill(self, hidden_TH: Tensor, batch: Batch) -> None:
        """Write a step, then padding: rows that take no expert, write no KV and see no token."""
        own, rows, own_holders = self.batch.attention, batch.attention, self.batch.sharding.holders
        sequences = len(rows.extents_b2)
        self.hidden_TH[: len(hidden_TH)] = hidden_TH
        self.batch.padding_T.fill_(True)[: len(hidden_TH)] = False
        if own_holders is None:
            at_t = torch.arange(len(hidden_TH), device=hidden_TH.device)
        else:
            at_t = own_holders.fill(batch.sharding.holders)
        for own_rotation, rotation in zip(own.rotations, rows.rotations, strict=True):
            own_rotation.cos_tR[at_t] = rotation.cos_tR
            own_rotation.sin_tR[at_t] = rotation.sin_tR
        own.limits_t.zero_()[at_t] = rows.limits_t
        for own_view, view in zip(own.views, rows.views, strict=True):
            own_view.slots_t.fill_(-1)[at_t] = view.slots_t
            if view.firsts_t is not None:
                own_view.firsts_t.zero_()[at_t] = view.firsts_t
        own.extents_b2.zero_()
        if own.max_rows == 1:
            own.extents_b2[at_t] = rows.extents_b2
            torch.arange(len(own.limits_t) + 1, out=own.row_starts_b)
            return
        own.extents_b2[:sequences] = rows.extents_b2
        own.row_starts_b.fill_(len(own.limits_t))
        own.row_starts_b[:1] = 0
        # Padding between the rows of two sequences is the second one's.
        own.row_starts_b[1 : sequences + 1] = at_t[rows.row_starts_b[1:] - 1] + 1


def _empty_view(view: RowView, rows: int) -> RowView:
    """Memory for so many rows of a KV group. The blocks are those of the arena, which stays where it is."""
    firsts_t = None if view.firsts_t is None else view.firsts_t.new_empty(rows)
    return RowView(view.slots_t.new_empty(rows), view.blocks_X, firsts_t)


@dataclass(frozen=True)
class _Graph:
    inputs: _Inputs
    result_TH: Tensor
    replay: Callable[[], None]
    traffic: list[Traffic]


class GraphedLayers:
    """Runs `layers` from CUDA graphs: one step of a bucket is captured, later ones replay it with their own inputs.

    A bucket of decodes is captured the first time it is met. A bucket with chunks is captured the second time: most are
    met once, and a capture costs several runs of the layers. Steps of more than `most_rows` rows are never captured.

    mesh: its groups count the collectives of a replay, which are those of its capture.
    most_rows: see `most_graph_rows`.
    page_lists: FlashInfer's, prepared before a capture and before every replay.
    capture: captures a call; a CUDA graph by default.
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
        # Of all ranks alike, since they use the same: the one used last comes last, and the first goes first.
        self._graphs: dict[Bucket, _Graph] = {}
        self._met_once: set[Bucket] = set()

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """As `layers`; what it returns is overwritten by the next call."""
        if batch.alone or batch.sharding.token_shards is not None or len(hidden_TH) > self._most_rows:
            return self._layers(hidden_TH, batch)
        bucket = Bucket.of(batch)
        graph = self._graphs.pop(bucket, None)
        if graph is None and bucket.max_rows > 1 and bucket not in self._met_once:
            self._met_once.add(bucket)
            return self._layers(hidden_TH, batch)
        if graph is None:
            graph = self._new_graph(bucket, hidden_TH, batch)
        else:
            self._fill(graph.inputs, hidden_TH, batch)
            for group, traffic in zip(self._mesh.groups, graph.traffic, strict=False):  # others were made since
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

        # A capture may run the layers, and rows that experts then have are none of this step's.
        inputs.batch.padding_T.fill_(True)
        result_TH, replay = self._capture(call)
        inputs.batch.padding_T[: len(hidden_TH)] = False
        return _Graph(inputs, result_TH, replay, traffic)

    def _fill(self, inputs: _Inputs, hidden_TH: Tensor, batch: Batch) -> None:
        inputs.fill(hidden_TH, batch)
        if self._page_lists is not None:
            own = inputs.batch.attention
            self._page_lists.prepare(own.views[0].blocks_X, own.extents_b2, own.limits_t, own.max_rows)


class _CudaCapture:
    """Captures into graphs that share one pool of memory, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        # Kernels are compiled and libraries make their buffers before the capture, which would refuse both.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events on a thread of its own meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()
        return result, graph.replay
