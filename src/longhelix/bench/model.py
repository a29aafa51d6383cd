"""The model on one rank, as a worker builds it, and a request that is as long as it should be without its prefill."""

from collections.abc import Iterator
from pathlib import Path

import torch

from longhelix.cache.pool import KVPool
from longhelix.engine.config import EngineConfig
from longhelix.engine.rank import join, load_model, new_pool
from longhelix.engine.runner import ModelRunner
from longhelix.kernels import write_kv
from longhelix.kv.blocks import Block
from longhelix.kv.placement import Placement
from longhelix.request import NewSequence, SamplingParams, SequenceWork, Step

_FILL_BLOCKS = 1024


class RankModel:
    """This rank's part of a model. Every rank makes one, and runs the same steps."""

    def __init__(self, config: EngineConfig, rank: int, directory: Path) -> None:
        self.config = config
        self.mesh = join(config, rank, directory)
        self.decoder = load_model(config, self.mesh)

    @property
    def kvp_rank(self) -> int:
        return self.config.layout.kvp_rank(self.mesh.rank)

    def place(self, context: int) -> Placement:
        """The placement of a request of `context` tokens."""
        return self.config.scheduler.place(context, context, start=0)

    def local_length(self, context: int) -> int:
        """Tokens of a context's KV that this rank keeps."""
        return self.place(context).local_length(self.kvp_rank, context)

    def runner(self, context: int) -> ModelRunner:
        """A runner whose pool has room for one request of `context` tokens; contents undefined."""
        num_blocks = -(-self.local_length(context) // self.config.scheduler.block_tokens)
        pool = new_pool(self.config, self.mesh.rank, max(num_blocks, 1))
        return ModelRunner(self.config.spec, self.mesh, self.decoder, pool, self.config.execution)

    def blocks(self, context: int) -> tuple[Block, ...]:
        """The KV blocks of a request of `context` tokens that is alone: on each rank from 0 on."""
        used = [0] * self.config.layout.kvp
        blocks = []
        for position in range(0, context, self.config.scheduler.block_tokens):
            owner = self.place(context).owner(position)
            blocks.append(Block(owner, used[owner]))
            used[owner] += 1
        return tuple(blocks)


class LongRequest:
    """A request in the middle of its answer: `context` tokens, whose keys and values are random numbers."""

    def __init__(self, model: RankModel, context: int) -> None:
        self.runner = model.runner(context)
        self._before = context - 1, model.local_length(context - 1)
        fill(self.runner.pool)
        new = NewSequence(
            0, (1,) * context, SamplingParams(), seed=0, capacity_tokens=context, spread=model.place(context).spread
        )
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
    spread = model.place(length).spread
    new = (NewSequence(request_id, prompt, SamplingParams(), seed=0, capacity_tokens=length, spread=spread),)
    ended = (request_id - 1,) if request_id else ()
    blocks = model.blocks(length)
    for start in range(0, length, chunk_tokens):
        num_tokens = min(chunk_tokens, length - start)
        work = SequenceWork(request_id, num_tokens, blocks, sample=start + num_tokens == length)
        yield Step(start // chunk_tokens, new=new, work=(work,), ended=ended)
        new, ended, blocks = (), (), ()
