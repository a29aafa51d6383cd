"""Steps that a rank runs before the first request, so that compiling and capturing are done by then."""

from collections.abc import Iterable

from longhelix.kv.blocks import Block
from longhelix.request import TOKEN_BYTES, Chunk, NewSequence, SamplingParams, Step
from longhelix.runner.graphed_layers import padded
from longhelix.scheduler.config import SchedulerConfig

_BESIDE_A_CHUNK = (1, 2, 4)  # decodes; mixed steps of more sequences would be as many graphs again


def warm_up_steps(config: SchedulerConfig, lengths: Iterable[int]) -> list[Step]:
    """Steps of single rows in all padded numbers, a chunk, a chunk of two prompts, and chunks beside some single rows;
    each of them as for sequences of each of `lengths`.

    Launches and graphs depend on a step's `most_tokens`, so no sequence needs to be that long. The sequences write only
    into KV blocks that no request has used yet, and have all ended with the last step.
    """
    chunk_tokens = min(config.chunk_tokens, config.max_model_len, config.num_blocks * config.block_tokens * config.kvp)
    most_running = min(config.max_running, config.num_blocks)
    batches = [
        (1,) * rows for rows in sorted({min(padded(count), most_running) for count in range(1, most_running + 1)})
    ]
    batches += [(chunk_tokens,), (max(chunk_tokens - 1, 1), 1)]
    # Decodes take nothing of the chunk's budget.
    batches += [(chunk_tokens, *(1,) * decodes) for decodes in _BESIDE_A_CHUNK]
    batches = [rows for rows in dict.fromkeys(batches) if len(rows) <= most_running]
    steps: list[Step] = []
    ended: tuple[int, ...] = ()
    first = 0
    for rows in batches:
        for most_tokens in lengths:
            ids = range(first, first + len(rows))
            new = tuple(_new(config, id, count) for id, count in zip(ids, rows, strict=True))
            chunks = tuple(
                Chunk(id, bytes(TOKEN_BYTES * count), _blocks(config, count), sample=True)
                for id, count in zip(ids, rows, strict=True)
            )
            steps.append(Step(len(steps), new, chunks=chunks, ended=ended, most_tokens=most_tokens))
            first, ended = ids.stop, tuple(ids)
    return [*steps, Step(len(steps), ended=ended)]


def _new(config: SchedulerConfig, id: int, length: int) -> NewSequence:
    blocks = _blocks(config, length)
    return NewSequence(
        id,
        SamplingParams(),
        seed=0,
        capacity_tokens=length,
        blocks_per_rank=tuple(sum(block.owner == rank for block in blocks) for rank in range(config.kvp)),
        spread=True,
    )


def _blocks(config: SchedulerConfig, length: int) -> tuple[Block, ...]:
    """The same blocks for all sequences, from the first on."""
    count = -(-length // config.block_tokens)
    return tuple(Block(index % config.kvp, index // config.kvp) for index in range(count))
