"""One rank's part of a model, built in the same way as in a worker, and long requests with random KV."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat, KVLayer, write_kv
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.rank import join, load_model, new_pool, new_runner
from longhelix.compute.runner.runner import ModelRunner
from longhelix.measure.hosts import meet
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Placement
from longhelix.scheduler.kv.windows import with_any
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import Chunk, InitialKV, NewSequence, SequenceChanges, Step, Turn
from longhelix.scheduler.work import Work

_FILL_BLOCKS = 1024


class RankModel:
    """This rank's shard of a model. Every rank creates its own shard, and all ranks run the same steps."""

    def __init__(self, config: EngineConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.decoder = load_model(config, mesh)

    @classmethod
    def join(cls, config: EngineConfig, rank: int, directory: Path) -> Self:
        """Connect to the other ranks, and load this rank's shard."""
        if len(config.machines.hosts.ranks) > 1 and not dist.is_initialized():
            meet(config.layout.world_size, rank, directory)
        return cls(config, join(config, rank, directory))

    @property
    def kvp_rank(self) -> int:
        return self.config.layout.kvp_rank(self.mesh.rank)

    def place(self, context: int, index: int = 0) -> Placement:
        """Placement of request number `index` with `context` tokens.

        Successive requests start on successive KVP ranks.
        """
        return self.config.scheduler.place(context, context, start=index % self.config.layout.kvp)

    def local_length(self, context: int, index: int = 0) -> int:
        """Number of tokens of a context whose KV is on this rank."""
        return self.place(context, index).local_length(self.kvp_rank, context)

    def blocks_per_rank(self, context: int, index: int = 0) -> tuple[int, ...]:
        """Number of KV blocks of a context on each KVP rank."""
        place, block_tokens = self.place(context, index), self.config.scheduler.block_tokens
        return tuple(-(-place.local_length(rank, context) // block_tokens) for rank in range(self.config.layout.kvp))

    def runner(self, *contexts: int) -> ModelRunner:
        """Create a runner whose KV pool has room for requests of `contexts` tokens. The KV in the pool is undefined."""
        needed = zip(*(self.blocks_per_rank(context, index) for index, context in enumerate(contexts)), strict=True)
        # The pools of all ranks have the same size, so that the schedulers of all ranks make the same decisions.
        pool = new_pool(self.config, self.mesh.rank, max(*map(sum, needed), 1))
        return new_runner(self.config, self.mesh, self.decoder, pool)

    def blocks(self, *contexts: int) -> list[tuple[Block, ...]]:
        """KV blocks of requests of `contexts` tokens, in the form of `Step`. The block numbers of each rank start at 0.
        In KV groups with a limit, requests share blocks."""
        used = [0] * self.config.layout.kvp
        requests = []
        for index, context in enumerate(contexts):
            place, blocks = self.place(context, index), []
            for position in range(0, context, self.config.scheduler.block_tokens):
                owner = place.owner(position)
                blocks.append(Block(owner, used[owner]))
                used[owner] += 1
            requests.append(with_any(tuple(blocks), self.config.scheduler.cache.windows))
        return requests


class LongRequests:
    """Requests of `contexts` tokens in the decode phase, with random keys and values.

    With pipeline stages, the requests run in as many micro-batches.
    """

    def __init__(self, model: RankModel, *contexts: int) -> None:
        self.runner = model.runner(*contexts)
        fill(self.runner.pool)
        microbatches = min(model.config.layout.pp, len(contexts))
        self._batches = [range(first, len(contexts), microbatches) for first in range(microbatches)]
        self._before = [(context - 1, model.local_length(context - 1, index)) for index, context in enumerate(contexts)]
        new = tuple(
            NewSequence(
                index,
                SamplingParams(),
                seed=0,
                capacity_tokens=context,
                kv=InitialKV(model.blocks_per_rank(context, index), spread=model.place(context).spread),
            )
            for index, context in enumerate(contexts)
        )
        self.runner.running.admit(Step(0, changes=SequenceChanges(new=new)))
        for number, batch in enumerate(self._batches):
            self.runner.running.admit(
                Step(0, turn=Turn(microbatch=number), changes=SequenceChanges(joining=tuple(batch)))
            )
        for index, blocks in enumerate(model.blocks(*contexts)):
            self.runner.running.by_id[index].add_blocks(blocks, model.kvp_rank)
        self._works = [Work.decode(len(batch), max(contexts)) for batch in self._batches]
        self._most_tokens = max(contexts)

    def step(self, parts: int = 1) -> None:
        """Run one decode step of all requests. Stages may still be busy with it afterwards, until `settle`.

        The method first undoes the previous step, so that every call runs the same step.

        Args:
            parts: number of parts in which the requests attend (HOP-B).
        """
        steps = [
            Step(0, turn=Turn(microbatch=number), most_tokens=self._most_tokens, work=work._replace(parts=parts))
            for number, work in enumerate(self._works)
        ]
        for step in steps:
            self.runner.expect(step)
        for batch, step in zip(self._batches, steps, strict=True):
            for index in batch:
                seq = self.runner.running.by_id[index]
                seq.length, seq.local_length = self._before[index]
                if seq.awaited_tokens is None:
                    seq.last_token = 1
            self.runner.execute(step)

    def settle(self) -> None:
        """Wait until all tokens of the last step are known."""
        self.runner.receive_all_tokens()


def fill(pool: KVPool) -> None:
    """Fill a pool with random keys and values in its dtype. The values repeat after _FILL_BLOCKS blocks."""
    for format in pool.formats:
        entries = [entry for entry in pool.entries() if entry.format == format]
        least = min(len(blocks) for entry in entries for blocks in entry.by_block)
        _fill(entries, format, min(least, _FILL_BLOCKS))


def _fill(entries: list[KVLayer], format: KVFormat, num_blocks: int) -> None:
    if not format.num_kv_heads:
        return
    rows = num_blocks * format.block_tokens
    k_TkC = torch.randn(rows, format.num_kv_heads, format.key_size).bfloat16()
    v_TkC = None if format.shared_values else torch.randn(rows, format.num_kv_heads, format.value_size).bfloat16()
    write_kv(k_TkC, v_TkC, entries[0], torch.arange(rows))
    for entry in entries:
        for blocks, written in zip(entry.by_block, entries[0].by_block, strict=True):
            for piece in blocks.split(num_blocks):
                piece.copy_(written[: len(piece)])


def prefill_steps(model: RankModel, request_id: int, prompt: tuple[int, ...]) -> Iterator[Step]:
    """Yield the steps that prefill a prompt.

    The first step ends the previous request. The last step samples a token.
    """
    chunk_tokens, block_tokens = model.config.scheduler.steps.chunk_tokens, model.config.scheduler.block_tokens
    groups = 1 + len(model.config.scheduler.cache.windows)
    length = len(prompt)
    new: tuple[NewSequence, ...] = (
        NewSequence(
            request_id,
            SamplingParams(),
            seed=0,
            capacity_tokens=length,
            kv=InitialKV(model.blocks_per_rank(length), spread=model.place(length).spread),
        ),
    )
    ended = (request_id - 1,) if request_id else ()
    (blocks,) = model.blocks(length)
    for start in range(0, length, chunk_tokens):
        stop = min(start + chunk_tokens, length)
        new_blocks = blocks[-(-start // block_tokens) * groups : -(-stop // block_tokens) * groups]
        chunk = Chunk(request_id, array("i", prompt[start:stop]).tobytes(), new_blocks, sample=stop == length)
        work = Work.chunk(stop - start, start)
        yield Step(
            start // chunk_tokens,
            changes=SequenceChanges(new=new, ended=ended),
            chunks=(chunk,),
            most_tokens=stop,
            work=work,
        )
        new, ended = (), ()
