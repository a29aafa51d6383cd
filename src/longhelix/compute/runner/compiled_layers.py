"""Runs the decoder's layers from graphs of torch.compile, one for each range of tokens."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.token_shards import TokenShards
from longhelix.compute.parallel.collectives import is_lost_peer
from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.errors import PeerLostError, UserError

Graph = Callable[[Tensor, Batch], Tensor]


class CompiledLayers:
    """Runs all layers as one graph, with one graph for each range of tokens, and another for steps with image rows.

    If ranks have different rows or share rows, a step runs op by op, because each step would need a separate graph. The
    choice depends only on the rows of the step, so all ranks of a stage choose the same. Raises UserError without the
    C++ compiler that torch.compile calls.
    """

    def __init__(self, model: Decoder, pool: KVPool, ranges: TokenRanges) -> None:
        _check_compiler()
        # With duck shapes, sizes that are equal by chance in a graph's first step would have to be equal in all steps,
        # and other steps would compile again. Without duck shapes, torch would turn each norm's eps into an operand.
        shapes.use_duck_shape = False
        torch._dynamo.config.specialize_float = True
        for entry in pool.entries():
            for tensor in entry.tensors:
                torch._dynamo.mark_static(tensor)  # a symbol less for each of its sizes
        self._layers = partial(model.run_layers, pool=pool)
        self._group = model.mesh.ffn
        self._ranges = ranges
        self._graphs: dict[tuple[tuple[int, int | None], bool, bool], Graph] = {}

    def __call__(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        sharding = batch.sharding
        if sharding.holders is not None or sharding.shared:
            return self._layers(hidden_TH, batch)
        tokens = len(hidden_TH)
        shards = self._ranges.shards(tokens, batch.decodes) and sharding.token_shards is None
        range_ = self._ranges.range_of(tokens)
        key = range_, shards, batch.images is not None
        if key not in self._graphs:
            self._graphs[key] = self._compile(range_, shards)
        if shards:
            pass_shards = TokenShards(self._group, batch.token_ids_T)
            batch = replace(batch, sharding=replace(sharding, pass_shards=pass_shards))
        try:
            return self._graphs[key](hidden_TH, batch)
        except RuntimeError as error:  # from collectives in the graph, which bypass RankGroup
            if not is_lost_peer(error):
                raise
            raise PeerLostError(f"a compiled graph: {error}") from error

    def _compile(self, tokens: tuple[int, int | None], shards: bool) -> Graph:
        options: dict[str, Any] = {}
        if shards:
            from longhelix.passes import SequenceParallel  # loads the compiler, which takes seconds

            rounds = torch.ops.longhelix.quantise_rows.default
            options["post_grad_custom_pre_pass"] = SequenceParallel(
                self._group.process_group,
                self._ranges.sp_min_tokens,
                tokens=tokens,
                own_chunks=True,
                token_wise={rounds: ["x_TX"]},
                norms=[rounds],
            )
        return torch.compile(self._function(), fullgraph=True, dynamic=True, options=options)

    def _function(self) -> Graph:
        """Return the layers as a new function, because torch.compile limits the number of graphs per function."""

        def run(hidden_TH: Tensor, batch: Batch) -> Tensor:
            return self._layers(hidden_TH, batch)

        run.__code__ = run.__code__.replace()
        return run


def _check_compiler() -> None:
    """Raise UserError without the C++ compiler that torch.compile would call."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"execution compiled needs a C++ compiler, but {compiler} is not found: install it, set CXX to another, "
            "or leave the option out"
        )
