"""Steps that a rank runs before the first request, to compile kernels and capture graphs."""

import dataclasses
from collections.abc import Callable, Iterable

from msgspec import structs

from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.graphed_layers import padded
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.token_ranges import ONE_RANGE, TokenRanges
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.splits import length_buckets
from longhelix.scheduler.kv.windows import with_any
from longhelix.scheduler.request import ImageSpan, SamplingParams
from longhelix.scheduler.step import TOKEN_BYTES, Chunk, InitialKV, NewSequence, SequenceChanges, Step, Turn
from longhelix.scheduler.work import NO_WORK, Work

# Whether requests keep their KV on all ranks from the start. With other placements, some do and some do not.
_SPREADS = {"striped": (True,), "local": (False,)}
_DECODES_WITH_CHUNK = (1, 2, 4)  # number of decodes; more would need as many graphs again
BLANK = bytes(32)  # the digest of images that show nothing


def warm_up(config: EngineConfig, runner: ModelRunner, on_done: Callable[[float], None]) -> None:
    """Run the warm-up steps. Calls `on_done` with the finished share, from 0 to 1."""
    scheduler = config.scheduler
    longest_tokens = scheduler.longest_local_tokens
    lengths = length_buckets(longest_tokens) if config.machines.device == "cuda" else [longest_tokens]
    images = config.execution.compile and config.spec.vision is not None
    steps = warm_up_steps(scheduler, lengths, config.execution.token_ranges, images)
    for num_done, step in enumerate(steps, start=1):
        runner.expect(step)
        for sequence in step.changes.new:
            for image in sequence.images:
                runner.take_blank_rows(sequence.id, image.num_tokens)
        runner.execute(step)
        on_done(num_done / len(steps))
    runner.receive_all_tokens()
    runner.model.forget_expert_rows()


def warm_up_steps(
    config: SchedulerConfig, lengths: Iterable[int], ranges: TokenRanges = ONE_RANGE, images: bool = False
) -> list[Step]:
    """Return the warm-up steps.

    For each of `lengths`: decodes in every padded number of rows, a chunk of one prompt and a chunk of two prompts for
    each of `ranges`, and chunks together with decodes. If requests may keep their KV on one rank, the same steps again
    with sequences on single ranks in turn. If ranks have their own clocks, each rank runs all steps once.

    Launches and graphs depend on a step's `most_tokens`, so no sequence needs to be that long. The sequences write only
    into KV blocks that no request has used yet, and end with the last step.

    Args:
        images: Add chunks that show a blank image.
    """
    if config.steps.own_clocks:
        alone = dataclasses.replace(config, kvp=1, steps=dataclasses.replace(config.steps, own_clocks=False))
        steps_of_one = warm_up_steps(alone, lengths, ranges, images)
        return [_of_instance(step, instance, config.kvp) for step in steps_of_one for instance in range(config.kvp)]
    steps: list[Step] = []
    ended: tuple[int, ...] = ()
    first = 0
    for spread in _SPREADS.get(config.placement.name, (True, False)) if config.kvp > 1 else (True,):
        for rows, image in _batches(config, spread, ranges, images):
            for most_tokens in lengths:
                ids = range(first, first + len(rows))
                blocks = [_blocks(config, count, None if spread else at % config.kvp) for at, count in enumerate(rows)]
                sequences = list(zip(ids, rows, blocks, strict=True))
                shown = (ImageSpan(0, 1, rows[0], BLANK),) if image else ()
                new = tuple(
                    _new(config, *sequence, spread, shown if at == 0 else ()) for at, sequence in enumerate(sequences)
                )
                chunks = tuple(
                    Chunk(id, bytes(TOKEN_BYTES * count), with_any(own_blocks, config.cache.windows), sample=True)
                    for id, count, own_blocks in sequences
                )
                work = sum((Work.chunk(count, 0) for count in rows), NO_WORK)
                steps.append(
                    Step(
                        len(steps),
                        changes=SequenceChanges(new=new, ended=ended),
                        chunks=chunks,
                        most_tokens=most_tokens,
                        work=work,
                    )
                )
                first, ended = ids.stop, tuple(ids)
    return [*steps, Step(len(steps), changes=SequenceChanges(ended=ended))]


def _of_instance(step: Step, instance: int, kvp: int) -> Step:
    """Turn a step of one rank into a step of one of several instances."""

    def moved(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        return tuple(Block(instance, block.id) for block in blocks)

    new = tuple(
        structs.replace(
            sequence,
            kv=InitialKV(
                tuple(sequence.kv.blocks_per_rank[0] * (rank == instance) for rank in range(kvp)),
                spread=sequence.kv.spread,
            ),
            instances=(instance,),
        )
        for sequence in step.changes.new
    )
    chunks = tuple(dataclasses.replace(chunk, new_blocks=moved(chunk.new_blocks)) for chunk in step.chunks)
    changes = structs.replace(step.changes, new=new)
    return structs.replace(step, turn=Turn(instances=(instance,)), changes=changes, chunks=chunks)


def _batches(
    config: SchedulerConfig, spread: bool, ranges: TokenRanges, images: bool
) -> list[tuple[tuple[int, ...], bool]]:
    """Return the rows of each sequence for every batch, and whether an image fills the rows of the first sequence."""
    room_tokens = config.num_blocks * config.block_tokens * (config.kvp if spread else 1)
    chunk_tokens = min(config.steps.chunk_tokens, config.max_model_len, room_tokens)
    most_running = min(config.steps.max_running, config.num_blocks)
    batches = [
        (1,) * rows for rows in sorted({min(padded(count), most_running) for count in range(1, most_running + 1)})
    ]
    chunks = _chunks(chunk_tokens, most_running, ranges)
    batches += chunks
    if not spread:  # each rank's prompts get an even share of the chunk
        batches.append((max(chunk_tokens // config.kvp, 1),) * config.kvp)
    batches += [(chunk_tokens, *(1,) * decodes) for decodes in _DECODES_WITH_CHUNK]
    kinds = [(rows, False) for rows in batches] + [(rows, True) for rows in chunks if images]
    return [(rows, image) for rows, image in dict.fromkeys(kinds) if len(rows) <= most_running]


def _chunks(chunk_tokens: int, most_running: int, ranges: TokenRanges) -> list[tuple[int, ...]]:
    """Return the rows of a chunk of one prompt and of two prompts, for each range.

    Ranges above the longest chunk get it together with decodes, which do not count toward the chunk budget.
    """
    longest = [chunk_tokens, *(first - 1 for first in ranges.splits if 1 < first <= chunk_tokens)]
    beyond = [first - chunk_tokens for first in ranges.splits if 0 < first - chunk_tokens < most_running]
    chunks = [rows for tokens in longest for rows in ((tokens,), (max(tokens - 1, 1), 1))]
    return chunks + [(chunk_tokens, *(1,) * decodes) for decodes in beyond]


def _new(
    config: SchedulerConfig,
    id: int,
    length: int,
    blocks: tuple[Block, ...],
    spread: bool,
    images: tuple[ImageSpan, ...],
) -> NewSequence:
    return NewSequence(
        id,
        SamplingParams(),
        seed=0,
        capacity_tokens=length,
        kv=InitialKV(tuple(sum(block.owner == rank for block in blocks) for rank in range(config.kvp)), spread),
        images=images,
    )


def _blocks(config: SchedulerConfig, length: int, home: int | None) -> tuple[Block, ...]:
    """Return the first KV blocks, which all sequences use: on all ranks in turn, or on the rank `home`."""
    count = -(-length // config.block_tokens)
    if home is not None:
        return tuple(Block(home, index) for index in range(count))
    return tuple(Block(index % config.kvp, index // config.kvp) for index in range(count))
