"""Steps that a rank runs before the first request: what compiles, or is captured, does so then."""

from longhelix.kv.blocks import Block
from longhelix.request import NewSequence, SamplingParams, SequenceWork, Step
from longhelix.scheduler.scheduler import SchedulerConfig

_DECODE_ROWS = (1, 2, 4, 8, 16)


def warm_up_steps(config: SchedulerConfig) -> list[Step]:
    """Decode steps of several sizes, a chunk, a chunk beside a decode. They write over KV that nobody has written yet,
    and leave no sequence behind."""
    chunk_tokens = min(config.chunk_tokens, config.max_model_len, config.num_blocks * config.block_tokens * config.kvp)
    batches = [(1,) * rows for rows in _DECODE_ROWS] + [(chunk_tokens,), (max(chunk_tokens - 1, 1), 1)]
    steps: list[Step] = []
    ended: tuple[int, ...] = ()
    first = 0
    for lengths in batches:
        ids = range(first, first + len(lengths))
        new = tuple(
            NewSequence(id, (0,) * length, SamplingParams(), seed=0, capacity_tokens=length, spread=True)
            for id, length in zip(ids, lengths, strict=True)
        )
        work = tuple(
            SequenceWork(id, length, _blocks(config, length), sample=True)
            for id, length in zip(ids, lengths, strict=True)
        )
        steps.append(Step(len(steps), new=new, work=work, ended=ended))
        first, ended = ids.stop, tuple(ids)
    return [*steps, Step(len(steps), new=(), work=(), ended=ended)]


def _blocks(config: SchedulerConfig, length: int) -> tuple[Block, ...]:
    """The same blocks for all sequences, from the first on."""
    count = -(-length // config.block_tokens)
    return tuple(Block(index % config.kvp, index // config.kvp) for index in range(count))
