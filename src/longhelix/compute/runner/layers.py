"""Makes one function of the decoder's layers, in the way that a rank's `Execution` says."""

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
    """Return `Decoder.run_layers` over `pool`, run as `execution` says. Each call may overwrite the last result.

    Args:
        spec: The whole model.
        page_lists: For FlashInfer's attention in CUDA graphs.
        spans: The spans of the model. Compiled layers are one span.
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
