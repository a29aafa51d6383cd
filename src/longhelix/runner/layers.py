"""The decoder's layers as one function, made as a rank's `Execution` says."""

import os
import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from longhelix.cache.pool import KVPool
from longhelix.errors import PeerLostError, UserError
from longhelix.kernels.flashinfer import PageLists
from longhelix.models.batch import Batch
from longhelix.models.decoder import Decoder
from longhelix.parallel.collectives import is_lost_peer
from longhelix.runner.execution import Execution
from longhelix.runner.graphed_layers import GraphedLayers
from longhelix.runner.taped_layers import TapedLayers
from longhelix.spans import UNTRACED, Spans

Layers = Callable[[Tensor, Batch], Tensor]


def make_layers(
    execution: Execution, model: Decoder, pool: KVPool, page_lists: PageLists | None = None, spans: Spans = UNTRACED
) -> Layers:
    """`Decoder.run_layers` over `pool`, run as `execution` says. What it returns may be overwritten by the next call.

    `page_lists`: for FlashInfer's attention in CUDA graphs. `spans`: those of the model; they see compiled layers as
    one span.
    """
    layers: Layers = partial(model.run_layers, pool=pool)
    if execution.compiled:
        _check_compiler()
        layers = _Compiled(model, pool)
    if execution.tapes:
        layers = TapedLayers(layers, spans)
    if execution.graphs:
        layers = GraphedLayers(layers, model.mesh, page_lists)
    return _as_one_span(layers, spans) if execution.compiled else layers


def _as_one_span(layers: Layers, spans: Spans) -> Layers:
    def run(hidden_TH: Tensor, batch: Batch) -> Tensor:
        span = spans.begin("layers")
        hidden_TH = layers(hidden_TH, batch)
        spans.end(span)
        return hidden_TH

    return run


class _Compiled:
    """All layers as one graph. Steps of which ranks have different rows, or share some, or that have rows of images
    run op by op: each would need a graph of its own."""

    def __init__(self, model: Decoder, pool: KVPool) -> None:
        self._layers = partial(model.run_layers, pool=pool)
        self._graph = partial(torch.compile(model.run_layers, fullgraph=True, dynamic=True), pool=pool)

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        if batch.holders is not None or batch.alone:
            return self._layers(hidden_TH, batch)
        try:
            return self._graph(hidden_TH, batch)
        except RuntimeError as error:  # of collectives in the graph, which no RankGroup sees
            if not is_lost_peer(error):
                raise
            raise PeerLostError(f"a compiled graph: {error}") from error


def _check_compiler() -> None:
    """Raise UserError without the C++ compiler that torch.compile would call."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"execution compiled needs a C++ compiler, but {compiler} is not found: install it, set CXX to another, "
            "or leave the option out"
        )
