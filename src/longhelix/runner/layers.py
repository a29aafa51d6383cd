"""How a rank runs the decoder's layers: recorded once for each shape of step, compiled, or op by op from Python."""

import os
import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from longhelix.cache.pool import KVPool
from longhelix.errors import PeerLostError, UserError
from longhelix.kernels import native
from longhelix.kernels.flashinfer import Planner
from longhelix.models.batch import Batch
from longhelix.models.decoder import Decoder
from longhelix.parallel.collectives import is_lost_peer
from longhelix.runner.graphed_layers import GraphedLayers
from longhelix.runner.taped_layers import TapedLayers

Layers = Callable[[Tensor, Batch], Tensor]


def make_layers(model: Decoder, pool: KVPool, execution: str, planner: Planner | None = None) -> Layers:
    """`Decoder.run_layers` over `pool`; what it returns may be overwritten by the next call.

    "recorded": decode steps on a CPU run from tapes, all steps on a GPU from CUDA graphs. "compiled": all layers as
    one graph of torch.compile, collectives in it; on a GPU that is what CUDA graphs record. "eager": neither.
    `planner`: FlashInfer's, for the attention of CUDA graphs.
    """
    layers: Layers = partial(model.run_layers, pool=pool)
    if execution == "eager":
        return layers
    if execution == "compiled":
        _check_compiler()
        layers = _Compiled(model, pool)
    if pool.device.type == "cuda":
        return GraphedLayers(layers, model.mesh, planner)
    # Kernels that the compiler made would be missing from a tape.
    return TapedLayers(layers) if execution == "recorded" and native.module is not None else layers


class _Compiled:
    """All layers as one graph; op by op for steps of which ranks have different rows, which would be many graphs."""

    def __init__(self, model: Decoder, pool: KVPool) -> None:
        self._layers = partial(model.run_layers, pool=pool)
        self._graph = partial(torch.compile(model.run_layers, fullgraph=True, dynamic=True), pool=pool)

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        if batch.holders is not None:
            return self._layers(hidden_TH, batch)
        try:
            return self._graph(hidden_TH, batch)
        except RuntimeError as error:  # of collectives in the graph, which no Group sees
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
