"""The model on one rank, as a worker builds it, and a request that is as long as it should be without its prefill."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from longhelix.cache.pool import KVPool
from longhelix.engine.config import EngineConfig
from longhelix.engine.runner import ModelRunner
from longhelix.kernels import KVFormat, native, write_kv
from longhelix.kv.blocks import Block
from longhelix.kv.placement import Placement, make_placement
from longhelix.models.checkpoint import open_checkpoint
from longhelix.models.decoder import Decoder
from longhelix.models.parameters import declare
from longhelix.models.weights import load
from longhelix.parallel.mesh import Mesh
from longhelix.request import NewSequence, SamplingParams, SequenceWork, Step

_CPU = torch.device("cpu")
_FILL_BLOCKS = 1024


def join(size: int, rank: int, directory: Path) -> None:
    """Find the other ranks, all on this host; nothing listens beyond it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=size)


class RankModel:
    """This rank's part of a model. Every rank makes one, and runs the same steps."""

    def __init__(self, config: EngineConfig, rank: int, directory: Path) -> None:
        native.set_num_threads(config.threads_per_rank)
        if config.layout.world_size > 1:
            join(config.layout.world_size, rank, directory)
        self.config = config
        self.mesh = Mesh.build(config.layout, rank)
        parameters, dtype = declare(config.spec, config.layout, rank), getattr(torch, config.dtype)
        weights = load(open_checkpoint(config.model_path), parameters, dtype, _CPU, lambda elements: None)
        self.decoder = Decoder(config.spec, self.mesh, weights, config.weight_dtype)

    @property
    def kvp_rank(self) -> int:
        return self.config.layout.kvp_rank(self.mesh.rank)

    @property
    def placement(self) -> Placement:
        scheduler = self.config.scheduler
        return make_placement(
            scheduler.placement, scheduler.kvp, scheduler.block_tokens, scheduler.growth_limit_tokens, start=0
        )

    def local_length(self, context: int) -> int:
        """Tokens of a context's KV that this rank keeps."""
        return self.placement.local_length(self.kvp_rank, context)

    def runner(self, context: int) -> ModelRunner:
        """A runner whose pool has room for one request of `context` tokens; contents undefined."""
        config, spec = self.config, self.config.spec
        num_kv_heads = len(config.layout.kv_heads(config.heads, self.mesh.rank))
        block_tokens, size = config.scheduler.block_tokens, spec.head_size
        format = KVFormat.choose(config.kv_dtype, block_tokens, num_kv_heads, size, size, _CPU)
        num_blocks = -(-self.local_length(context) // block_tokens)
        return ModelRunner(spec, self.mesh, self.decoder, KVPool(format, spec.num_layers, max(num_blocks, 1), _CPU))

    def blocks(self, context: int) -> tuple[Block, ...]:
        """The KV blocks of a request of `context` tokens that is alone: on each rank from 0 on."""
        used = [0] * self.config.layout.kvp
        blocks = []
        for position in range(0, context, self.config.scheduler.block_tokens):
            owner = self.placement.owner(position)
            blocks.append(Block(owner, used[owner]))
            used[owner] += 1
        return tuple(blocks)


class LongRequest:
    """A request in the middle of its answer: `context` tokens, whose keys and values are random numbers."""

    def __init__(self, model: RankModel, context: int) -> None:
        self.runner = model.runner(context)
        self._before = context - 1, model.local_length(context - 1)
        fill(self.runner.pool)
        new = NewSequence(0, (1,) * context, SamplingParams(), seed=0, capacity_tokens=context)
        self.runner.admit(Step(0, new=(new,), work=(), ended=()))
        self._sequence = self.runner.sequences[0]
        self._sequence.add_blocks(model.blocks(context), model.kvp_rank, self.runner.table)

    def step(self) -> None:
        """Write the KV of the last of `context` tokens and sample the next one; always the same step."""
        self._sequence.length, self._sequence.local_length = self._before
        self.runner.execute(Step(0, new=(), work=(SequenceWork(0, 1, (), sample=True),), ended=()))


def fill(pool: KVPool) -> None:
    """Random keys and values, quantised as the pool's dtype asks: the same _FILL_BLOCKS blocks again and again."""
    format, first = pool.format, pool.layers[0]
    if not format.num_kv_heads:
        return
    num_blocks = min(pool.num_blocks, _FILL_BLOCKS)
    rows = num_blocks * format.block_tokens
    k_TkC = torch.randn(rows, format.num_kv_heads, format.key_size).bfloat16()
    v_TkC = None if format.shared_values else torch.randn(rows, format.num_kv_heads, format.value_size).bfloat16()
    write_kv(k_TkC, v_TkC, first, torch.arange(rows))
    dim = 1 if format.packed else 0  # that of blocks
    for layer in pool.layers:
        for part, written in ((layer.values, first.values), (layer.scales, first.scales)):
            for piece in () if part is None else part.split(num_blocks, dim):
                piece.copy_(written.narrow(dim, 0, piece.shape[dim]))


def prefill_steps(model: RankModel, request_id: int, prompt: tuple[int, ...]) -> Iterator[Step]:
    """The steps of one prompt, in chunks; the last one samples. The request before it has ended."""
    chunk_tokens, length = model.config.scheduler.chunk_tokens, len(prompt)
    new = (NewSequence(request_id, prompt, SamplingParams(), seed=0, capacity_tokens=length),)
    ended = (request_id - 1,) if request_id else ()
    blocks = model.blocks(length)
    for start in range(0, length, chunk_tokens):
        num_tokens = min(chunk_tokens, length - start)
        work = SequenceWork(request_id, num_tokens, blocks, sample=start + num_tokens == length)
        yield Step(start // chunk_tokens, new=new, work=(work,), ended=ended)
        new, ended, blocks = (), (), ()
