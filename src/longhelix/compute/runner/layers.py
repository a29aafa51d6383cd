"""The decoder's layers as one function, made as a rank's `Execution` says."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels.flashinfer import PageLists
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.runner.compiled_layers import CompiledLayers
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.graphed_layers import GraphedLayers, most_graph_rows
from longhelix.compute.runner.taped_layers import TapedLayers
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec

Layers = Callable[[Tensor, Batch], Tensor]


def make_layers(
    spec: ModelSpec,
    execution: Execution,
    model: Decoder,
    pool: KVPool,
    page_lists: PageLists | None = None,
    spans: Spans = UNTRACED,
) -> Layers:
    """`Decoder.run_layers` over `pool`, run as `execution` says. What it returns may be overwritten by the next call.

    spec: the whole model's.
    page_lists: for FlashInfer's attention in CUDA graphs.
    spans: those of the model; they see compiled layers as one span.
    """
    layers: Layers = partial(model.run_layers, pool=pool)
    if execution.compiled:
        layers = CompiledLayers(model, pool, execution.token_ranges)
    if execution.tapes:
        layers = TapedLayers(layers, spans)
    if execution.graphs:
        most_rows = most_graph_rows(spec, model.mesh.layout.num_ranks)
        layers = GraphedLayers(layers, model.mesh, most_rows, page_lists)
    return _as_one_span(layers, spans) if execution.compiled else layers


def _as_one_span(layers: Layers, spans: Spans) -> Layers:
    def run(hidden_TH: Tensor, batch: Batch) -> Tensor:
        span = spans.begin("layers")
        hidden_TH = layers(hidden_TH, batch)
        spans.end(span)
        return hidden_TH

    return run
