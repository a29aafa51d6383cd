import re
import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from longhelix.errors import UserError
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.drafting import Drafter
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.pinned_prefix import PinnedPrefix
from longhelix.scheduler.prefix import Prefixes
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Chunk, Draft, NewSequence, PromptLogprobs, SampledToken, StepResult
from longhelix.scheduler.token_event import Usage
from longhelix.scheduler.work import NO_WORK, Work
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

VOCAB = 50
WHOLE = 10_000


def next_token(token_ids) -> int:
    """The fake model: a token that depends on every token before it."""
    return zlib.crc32(repr(list(token_ids)).encode()) % VOCAB


def expected_output(request: Request) -> list[int]:
    """What one request alone gives: new tokens without the one that stopped it."""
    if not request.sampling.max_new_tokens:
        return []
    token_ids = list(request.prompt_token_ids)
    while len(token_ids) < request.capacity_tokens:
        token = next_token(token_ids)
        if token in request.stop_token_ids:
            break
        token_ids.append(token)
    return token_ids[len(request.prompt_token_ids) :]


def expected_logprobs(request: Request) -> list[dict[int, float]]:
    """What is said of its prompt's tokens, from the second one on: each by all tokens before it."""
    if request.sampling.prompt_logprobs is None:
        return []
    prompt = list(request.prompt_token_ids)
    return [{prompt[place]: float(next_token(prompt[:place]))} for place in range(1, len(prompt))]


@dataclass
class Replica:
    """A worker's copy of one sequence, advanced by what steps say and nothing else."""

    new: NewSequence
    token_ids: list[int]
    length: int = 0
    blocks: list[Block] = field(default_factory=list)
    windows: list[list[Block]] = field(default_factory=list)  # by KV group with a limit, all places
    striped: bool = field(init=False)

    def __post_init__(self) -> None:
        self.striped = self.new.kv.spread

    def local_length(self, rank: int, length: int, block_tokens: int) -> int:
        """How many of the first `length` tokens are in blocks of a rank."""
        full, rest = divmod(length, block_tokens)
        local = sum(block.owner == rank for block in self.blocks[:full]) * block_tokens
        return local + (rest if rest and self.blocks[full].owner == rank else 0)

    @property
    def prompt_left(self) -> int:
        return max(self.prompt_tokens - self.length, 0)

    @property
    def prompt_tokens(self) -> int:
        return self.new.capacity_tokens - self.new.sampling.max_new_tokens

    @property
    def wants_decode(self) -> bool:
        return self.prompt_left == 0 and len(self.token_ids) < self.new.capacity_tokens


class FakeRunner:
    """All ranks in one process: keeps KV as (sequence, position, token) in slots, samples from what it reads back."""

    def __init__(
        self,
        config: SchedulerConfig,
        in_turn: bool = True,
        seconds: Callable[[Work], float] = lambda work: work.decode_kv_tokens + work.chunk_pairs,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.config = config
        self.seconds = seconds
        self.in_turn = in_turn  # prompts run as they came, in chunks of one size
        self.replicas: dict[int, Replica] = {}
        self.microbatches: list[dict[int, Replica]] = [{} for _ in range(config.steps.pp)]
        self.decoding = self.microbatches[0]
        self.held_before: set[Block] = set()
        self.pools: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(config.kvp)]
        self.groups = 1 + len(config.cache.windows)
        # By KV group with a limit, rank and slot.
        self.window_pools: list[list[dict[int, tuple[int, int]]]] = [
            [{} for _ in range(config.kvp)] for _ in config.cache.windows
        ]
        self.slots: dict[tuple[int, int, int], list] = {}  # by group, owner and slot, what a swapped block had
        self.num_swapped = [0] * self.groups  # blocks that were swapped in, by group
        self.kept: set[Block] = set()  # blocks that something beside the sequences holds
        self.steps = []
        self.first_blocks: dict[int, int] = {}
        self.ended: dict[int, Replica] = {}
        self.moved_blocks: dict[int, int] = {}
        self.new: dict[int, NewSequence] = {}
        self.results: deque[StepResult] = deque()
        self.num_accepted = self.num_rejected = 0  # draft tokens

    def submit(self, step) -> None:
        self.results.append(self.execute(step))

    def collect(self, timeout_s: float) -> StepResult:
        return self.results.popleft()

    def execute(self, step) -> StepResult:
        assert step.id == len(self.steps) + 1
        self.steps.append(step)
        self.held_before = self.held()  # what a preempted sequence had keeps its content
        for sequence_id in step.changes.ended:
            self.ended[sequence_id] = self.replicas.pop(sequence_id)
            for decoding in self.microbatches:
                decoding.pop(sequence_id, None)
        for sequence_id in step.changes.leaving:
            (decoding,) = [decoding for decoding in self.microbatches if sequence_id in decoding]
            del decoding[sequence_id]
        self.decoding = self.microbatches[step.turn.microbatch]
        self.swap(step)
        self.copy(step)
        for draft in step.drafts:
            self.cut(self.replicas[draft.id], draft)
        for widened in step.changes.rebalances:
            decodes = (
                any(widened.id in decoding for decoding in self.microbatches) or widened.id in step.changes.joining
            )
            assert decodes or self.is_drafted(self.replicas[widened.id])
            self.widen(widened)
        for new in step.changes.new:
            assert new.id not in self.replicas
            self.first_blocks.pop(new.id, None)  # from before a preemption
            self.replicas[new.id] = self.replica(new)
            self.new[new.id] = new
        for sequence_id in step.changes.joining:
            assert not any(sequence_id in decoding for decoding in self.microbatches)
            self.decoding[sequence_id] = self.replicas[sequence_id]
        self.check_plan(step)
        ran = [*self.decoding, *(span.id for span in step.segments)]
        starts = {sequence_id: self.replicas[sequence_id].length for sequence_id in ran}
        for sequence_id, seq in self.decoding.items():
            self.write(seq, 1, [block for grown_id, block in step.changes.grown if grown_id == sequence_id])
        assert {sequence_id for sequence_id, _ in step.changes.grown} <= self.decoding.keys()
        for span in step.segments:
            seq = self.replicas[span.id]
            seq.token_ids += array("i", span.token_ids)
            self.write(seq, span.num_tokens, span.new_blocks)
        self.check_work(step)
        self.check_windows(starts)
        held = [self.blocks_of(self.replicas[sequence_id]) for sequence_id in ran]
        assert step.most_tokens == max((max(counts) for counts in held), default=0) * self.config.block_tokens
        sampled = []
        drafts = {draft.id: draft for draft in step.drafts}
        for sequence_id in ran:
            seq = self.replicas[sequence_id]
            assert self.read(sequence_id) == seq.token_ids[: seq.length]
            if sequence_id in drafts:
                sampled += self.verify(seq, drafts[sequence_id])
            elif seq.prompt_left == 0:
                assert seq.length == len(seq.token_ids)
                seq.token_ids.append(next_token(self.read(sequence_id)))
                sampled.append(SampledToken(sequence_id, seq.token_ids[-1]))
        num_rows = len(self.decoding) + sum(span.num_tokens for span in step.segments)
        found = tuple(self.score(chunk) for chunk in step.chunks if chunk.scored is not None)
        return StepResult(step.id, tuple(sampled), num_rows, prompt_logprobs=found)

    def is_drafted(self, seq: Replica) -> bool:
        return self.drafter is not None and self.drafter.drafts(seq.new)

    def cut(self, seq: Replica, draft: Draft) -> None:
        """Nothing is left of what was rejected. The last token is known, but has no KV yet."""
        assert not any(draft.id in decoding for decoding in self.microbatches)
        assert self.is_drafted(seq)
        assert draft.num_tokens >= 1
        assert draft.start + draft.num_tokens <= seq.new.num_rows
        assert (seq.length, len(seq.token_ids)) == (draft.start, draft.start + 1)
        assert seq.token_ids.pop() == array("i", draft.token_ids)[0]
        for blocks in (seq.blocks, *seq.windows):
            del blocks[-(-seq.length // self.config.block_tokens) :]

    def verify(self, seq: Replica, draft: Draft) -> list[SampledToken]:
        """A token after each row that is accepted."""
        token_ids, found = self.read(draft.id), []
        for length in range(draft.start + 1, len(token_ids) + 1):
            found.append(next_token(token_ids[:length]))
            if length == len(token_ids) or found[-1] != token_ids[length]:
                break
        seq.length = draft.start + len(found)
        seq.token_ids = token_ids[: seq.length] + found[-1:]
        self.num_accepted += len(found) - 1
        self.num_rejected += draft.num_tokens - len(found)
        return [SampledToken(draft.id, token_id) for token_id in found]

    def score(self, chunk: Chunk) -> PromptLogprobs:
        """Of each target what all tokens before it say, of which the last one is the row's."""
        assert chunk.scored.targets
        token_ids, targets = self.read(chunk.id), array("i", chunk.scored.targets)
        first = len(token_ids) - chunk.num_tokens + chunk.scored.first
        assert first + len(targets) <= len(token_ids)
        logprobs = [
            {target: float(next_token(token_ids[:place]))} for place, target in enumerate(targets, start=first + 1)
        ]
        return PromptLogprobs(chunk.id, tuple(logprobs))

    def swap(self, step) -> None:
        """Before copies: out to slots that the step does not read, then in to blocks that nobody has."""
        block_tokens, out, back = self.config.block_tokens, step.transfers.swapped_out, step.transfers.swapped_in
        num_slots = [self.config.cache.swap_blocks, *(window.num_slots for window in self.config.cache.windows)]
        places = {(swap.group, swap.block.owner, swap.slot) for swap in out}
        assert len(places) == len(out)
        assert len({(swap.group, swap.block) for swap in back}) == len(back)
        assert places.isdisjoint((swap.group, swap.block.owner, swap.slot) for swap in back)
        held = self.held() - {source for source, _ in step.moved}  # free by now, and cached
        of_groups = [held, *map(self.seen_in, range(len(self.config.cache.windows)))]
        assert not any(swap.block in of_groups[swap.group] for swap in (*out, *back))
        for swap in out:
            assert 0 <= swap.slot < num_slots[swap.group]
            pool, first = self.pool_of(swap), swap.block.id * block_tokens
            content = [pool[first + offset] for offset in range(block_tokens)]
            self.slots[swap.group, swap.block.owner, swap.slot] = content
        for swap in back:
            content = self.slots[swap.group, swap.block.owner, swap.slot]
            self.pool_of(swap).update(enumerate(content, swap.block.id * block_tokens))
            self.num_swapped[swap.group] += 1

    def pool_of(self, swap) -> dict:
        return (self.window_pools[swap.group - 1] if swap.group else self.pools)[swap.block.owner]

    def copy(self, step) -> None:
        """Before anything else: from blocks that somebody has to blocks that nobody has. All are read before one is
        written, as what moves away may make room for what moves in."""
        block_tokens, held = self.config.block_tokens, self.held()
        self.copy_in_windows(step.transfers.copies)
        own = step.transfers.copies[:: self.groups]
        copies = own + step.moved
        sources, targets = [source for source, _ in own], [target for _, target in copies]
        assert self.config.cache.prefix_cache or self.held_before.issuperset(sources)
        assert held.issuperset(source for source, _ in step.moved)
        assert (held - {source for source, _ in step.moved}).isdisjoint(targets)
        assert len(set(targets)) == len(targets)
        assert set(targets).isdisjoint(sources)
        assert all(source.owner == target.owner for source, target in own)
        assert all(source.owner != target.owner for source, target in step.moved)
        first = [source.id * block_tokens for source, _ in copies]
        read = [
            [self.pools[source.owner].get(slot + offset) for offset in range(block_tokens)]
            for slot, (source, _) in zip(first, copies, strict=True)
        ]
        for (_, target), found in zip(copies, read, strict=True):
            self.pools[target.owner] |= dict(enumerate(found, target.id * block_tokens))

    def copy_in_windows(self, copies) -> None:
        block_tokens = self.config.block_tokens
        for window, pools in enumerate(self.window_pools):
            for source, target in copies[1 + window :: self.groups]:
                assert source.owner == target.owner
                assert target not in self.seen_in(window)
                for offset in range(block_tokens):
                    found = pools[source.owner][source.id * block_tokens + offset]
                    pools[target.owner][target.id * block_tokens + offset] = found

    def seen_in(self, window: int) -> set[Block]:
        """The blocks of a KV group with a limit that coming rows see."""
        visibility, block_tokens = self.config.cache.windows[window].visibility, self.config.block_tokens
        return {
            block
            for seq in self.replicas.values()
            for block in seq.windows[window][
                visibility.first_seen(seq.length) // block_tokens : -(-seq.length // block_tokens)
            ]
        }

    def check_windows(self, starts: dict[int, int]) -> None:
        """All that the rows of the step see, those from `starts` on, is where it was written."""
        block_tokens = self.config.block_tokens
        for window, (pools, group) in enumerate(zip(self.window_pools, self.config.cache.windows, strict=True)):
            for sequence_id, start in starts.items():
                seq = self.replicas[sequence_id]
                for position in range(group.visibility.first_seen(start), seq.length):
                    block = seq.windows[window][position // block_tokens]
                    assert 0 <= block.id < group.num_blocks
                    slot = block.id * block_tokens + position % block_tokens
                    assert pools[block.owner][slot] == (position, tuple(seq.token_ids[: position + 1]))

    def widen(self, widened) -> None:
        """Blocks in the middle of a sequence become others."""
        seq = self.replicas[widened.id]
        moved = {move.source: move.target for move in widened.moves}
        assert len(moved) == len(widened.moves)
        assert moved.keys() <= set(seq.blocks[: seq.length // self.config.block_tokens])  # which are full
        seq.blocks = [moved.get(block, block) for block in seq.blocks]
        for at, group in enumerate(self.config.cache.windows):
            passed = group.visibility.first_seen(seq.length) // self.config.block_tokens
            assert all(move.place < passed for move in widened.moves)
            seq.windows[at] = [Block(block.owner, -1) for block in seq.blocks[:passed]] + seq.windows[at][passed:]
        seq.new, seq.striped = (
            structs.replace(seq.new, kv=structs.replace(seq.new.kv, blocks_per_rank=widened.blocks_per_rank)),
            True,
        )
        for move in widened.moves:
            assert seq.blocks[move.place] == move.target
        assert widened.moves == tuple(sorted(widened.moves, key=lambda move: seq.blocks.index(move.target)))
        self.moved_blocks[widened.id] = self.moved_blocks.get(widened.id, 0) + len(moved)

    def load(self, blocks, first: int, token_ids) -> None:
        """Fill the blocks of a prompt from that with index `first` on, between two steps."""
        block_tokens = self.config.block_tokens
        for position in range(first * block_tokens, len(blocks) * block_tokens):
            block = blocks[position // block_tokens]
            slot = block.id * block_tokens + position % block_tokens
            self.pools[block.owner][slot] = (-1, position, token_ids[position])

    def held(self) -> set[Block]:
        # Blocks behind a sequence's tokens were for draft tokens. The scheduler may have given them to others.
        counts = {id: -(-seq.length // self.config.block_tokens) for id, seq in self.replicas.items()}
        return {block for id, seq in self.replicas.items() for block in seq.blocks[: counts[id]]} | self.kept

    def replica(self, new: NewSequence) -> Replica:
        """A new one, which reads the tokens that it begins with from the pool."""
        if not new.kv.cached_blocks:
            assert not new.kv.cached_tokens
            return Replica(new, [], windows=[[] for _ in self.config.cache.windows])
        block_tokens, blocks = self.config.block_tokens, list(new.kv.cached_blocks[:: self.groups])
        windows = [list(new.kv.cached_blocks[1 + at :: self.groups]) for at in range(len(self.config.cache.windows))]
        assert all([block.owner for block in window] == [block.owner for block in blocks] for window in windows)
        full = new.kv.cached_tokens // block_tokens
        assert self.config.cache.prefix_cache or self.held_before.issuperset(blocks[:full])
        assert self.held().isdisjoint(blocks[full:])
        assert len(blocks) == -(-new.kv.cached_tokens // block_tokens)
        self.first_blocks[new.id] = blocks[0].owner
        entries = [
            self.pools[blocks[position // block_tokens].owner][
                blocks[position // block_tokens].id * block_tokens + position % block_tokens
            ]
            for position in range(new.kv.cached_tokens)
        ]
        assert [position for _, position, _ in entries] == list(range(new.kv.cached_tokens))
        return Replica(new, [token for *_, token in entries], new.kv.cached_tokens, blocks, windows)

    def check_work(self, step) -> None:
        """What the step has computed, counted again key by key: what is striped over all ranks alike, and KVP times
        what else the fullest rank has. By its cost no other rank takes longer."""
        block_tokens, kvp = self.config.block_tokens, self.config.kvp
        even, own = NO_WORK, [NO_WORK] * kvp
        ran = [(seq, 1, True) for seq in self.decoding.values()]
        ran += [(self.replicas[span.id], span.num_tokens, False) for span in step.segments]
        drafted = {draft.id for draft in step.drafts}
        even += Work(sampled_rows=sum(len(chunk.scored.targets) // 4 for chunk in step.chunks if chunk.scored))
        for seq, rows, decodes in ran:
            before, owners = seq.length - rows, [block.owner for block in seq.blocks]
            if decodes:
                even += Work(decode_rows=1, sampled_rows=1)
            else:
                even += Work(chunk_rows=rows, sampled_rows=rows if seq.new.id in drafted else int(seq.prompt_left == 0))
            in_turn = all((owner + 1) % kvp == following for owner, following in pairwise(owners))
            if seq.striped and in_turn:
                even += Work(0, seq.length) if decodes else Work.chunk(rows, before)._replace(chunk_rows=0)
                continue
            for position in range(seq.length):
                pairs = min(seq.length - position, rows)  # with rows at and behind it
                rank = owners[position // block_tokens]
                own[rank] += Work(0, kvp) if decodes else Work(0, 0, 0, kvp, kvp * pairs)
        works = [even + one for one in own]
        work = step.work._replace(parts=1)
        assert work in works
        assert all(self.seconds(one) <= self.seconds(work) for one in works)

    def check_plan(self, step) -> None:
        """Every running sequence that can decode does; prompts fill the chunk budget, where that is fixed, those that
        came first of each rank first, where that is the policy."""
        wanting = [seq for seq in self.replicas.values() if seq.wants_decode]
        assert all(self.replicas[draft.id] in wanting for draft in step.drafts)
        decodes = [seq.new.id for seq in wanting if not self.is_drafted(seq)]
        if self.config.steps.pp == 1:
            assert sorted(self.decoding) == sorted(decodes)
        assert all(self.replicas[sequence_id].wants_decode for sequence_id in self.decoding)
        assert len(self.replicas) <= self.config.steps.max_running
        chunks = step.chunks
        if not self.in_turn:
            return
        waiting = sorted((seq for seq in self.replicas.values() if seq.prompt_left), key=lambda seq: seq.new.id)
        assert sum(chunk.num_tokens for chunk in chunks) == min(
            self.config.steps.chunk_tokens, sum(seq.prompt_left for seq in waiting)
        )
        order = [seq.new.id for seq in waiting]
        assert [chunk.id for chunk in chunks] == sorted((chunk.id for chunk in chunks), key=order.index)
        held_up: set[int | None] = set()
        for chunk in chunks:
            seq = self.replicas[chunk.id]
            first = self.first_blocks.get(chunk.id, chunk.new_blocks[0].owner if chunk.new_blocks else None)
            shared = len({block.owner for block in seq.new.kv.cached_blocks}) > 1
            home = None if seq.new.kv.spread or shared else first
            assert home not in held_up, "a prompt runs before an older one of the same rank has all its tokens"
            assert 0 < chunk.num_tokens <= seq.prompt_left
            assert chunk.sample == (chunk.num_tokens == seq.prompt_left)
            if not chunk.sample:
                held_up.add(home)
        if all(seq.new.kv.spread for seq in waiting):
            assert len(held_up) <= 1
            assert [chunk.id for chunk in chunks] == order[: len(chunks)]

    def write(self, seq, num_tokens, new_blocks) -> None:
        sequence_id, block_tokens = seq.new.id, self.config.block_tokens
        taken = self.held()
        seen = [self.seen_in(window) for window in range(len(self.config.cache.windows))]
        own = list(new_blocks[:: self.groups])
        for at, (window, group) in enumerate(zip(seq.windows, self.config.cache.windows, strict=True)):
            more = new_blocks[1 + at :: self.groups]
            assert [block.owner for block in more] == [block.owner for block in own]
            assert len({*more}) == len(more)
            assert seen[at].isdisjoint(more)
            assert all(0 <= block.id < group.num_blocks for block in more)
            window += more
        for block in own:
            assert 0 <= block.id < self.config.num_blocks
            assert block not in taken
            taken.add(block)
            seq.blocks.append(block)
        for position in range(seq.length, seq.length + num_tokens):
            block = seq.blocks[position // block_tokens]
            slot = block.id * block_tokens + position % block_tokens
            self.pools[block.owner][slot] = (sequence_id, position, seq.token_ids[position])
            for window, pools in zip(seq.windows, self.window_pools, strict=True):
                block = window[position // block_tokens]
                slot = block.id * block_tokens + position % block_tokens
                pools[block.owner][slot] = position, tuple(seq.token_ids[: position + 1])
        seq.length += num_tokens
        assert len(seq.blocks) == -(-seq.length // block_tokens)
        self.first_blocks.setdefault(sequence_id, seq.blocks[0].owner)

    def blocks_of(self, seq: Replica) -> list[int]:
        counts = [sum(block.owner == rank for block in seq.blocks) for rank in range(self.config.kvp)]
        assert all(count <= most for count, most in zip(counts, seq.new.kv.blocks_per_rank, strict=True))
        return counts

    def read(self, sequence_id: int) -> list[int]:
        """The sequence's tokens as its KV has them: each rank's local tokens in local order, then by position."""
        seq, block_tokens = self.replicas[sequence_id], self.config.block_tokens
        found: dict[int, int] = {}
        for rank in range(self.config.kvp):
            local = [block.id for block in seq.blocks if block.owner == rank]
            slots = [
                local[index // block_tokens] * block_tokens + index % block_tokens
                for index in range(seq.local_length(rank, seq.length, block_tokens))
            ]
            entries = [self.pools[rank][slot] for slot in slots]
            cached_tokens = seq.new.kv.cached_tokens  # which others have written
            assert all(entry[0] == sequence_id for entry in entries if entry[1] >= cached_tokens)
            positions = [position for _, position, _ in entries]
            assert positions == sorted(positions)
            found |= {position: token for _, position, token in entries}
        return [found[position] for position in range(seq.length)]


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    kv_tokens_per_rank: tuple[int, ...] = ()
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)


def request(request_id: int, prompt_tokens: int, max_new_tokens: int = 4, stop=(), first: int = 0) -> Request:
    prompt = array("i", [(first + request_id * 31 + index) % VOCAB for index in range(prompt_tokens)])
    return Request(request_id, prompt, SamplingParams(max_new_tokens=max_new_tokens), frozenset(stop), 0, 0.0)


class Engine:
    """A loop over the fake runner, and what came out per request."""

    def __init__(self, config: SchedulerConfig, depth: int = 1, prefixes: Prefixes | None = None) -> None:
        self.scheduler = Scheduler(config, prefixes=prefixes)
        self.runner = FakeRunner(config)
        self.loop = Loop(self.scheduler, self.runner, lambda: 0.0, depth)
        self.outcomes: dict[int, Outcome] = {}
        self.num_sampled = 0

    def add(self, *requests: Request) -> None:
        for new in requests:
            self.loop.add(new)
            self.outcomes[new.id] = Outcome()

    def pin(self, request: Request) -> PinnedPrefix | None:
        return self.scheduler.pin_prefix(request, self.scheduler.hashes(request))

    def step(self) -> None:
        stepped = self.loop.step()
        assert stepped is not None
        result, events = stepped
        self.num_sampled += len(result.sampled)
        for event in events:
            outcome = self.outcomes[event.request_id]
            assert outcome.finish_reason is None
            outcome.prompt_logprobs += event.prompt_logprobs
            if event.sampled is not None:
                outcome.token_ids.append(event.sampled.token_id)
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                outcome.kv_tokens_per_rank = event.usage.kv_tokens_per_rank

    def abort(self, request_id: int) -> tuple[int, ...] | None:
        usage = self.loop.abort(request_id)
        held = None if usage is None else usage.kv_tokens_per_rank
        if held is not None:
            self.outcomes[request_id].finish_reason = "abort"
            self.outcomes[request_id].kv_tokens_per_rank = held
        return held

    def drain(self) -> dict[int, Outcome]:
        while self.loop.has_work:
            self.step()
        assert self.loop.step() is None
        self.assert_nothing_is_left()
        return self.outcomes

    def free_blocks(self) -> list[int]:
        return [allocator.available for allocator in self.scheduler.pool.allocators]

    def assert_nothing_is_left(self) -> None:
        assert self.free_blocks() == [self.scheduler.config.num_blocks] * self.scheduler.config.kvp
        assert all(allocator.reserved == 0 for allocator in self.scheduler.pool.allocators)
        for window in self.scheduler.pool.windows:
            assert all(allocator.available == window.num_blocks for allocator in window.allocators)
        assert not self.runner.replicas
        assert not self.runner.results


def config(**settings) -> SchedulerConfig:
    return scheduler_config(**{"kvp": 2, "num_blocks": 100, "max_model_len": 1000, "block_tokens": 4} | settings)


def run(settings: SchedulerConfig, *requests: Request, depth: int = 1) -> dict[int, Outcome]:
    engine = Engine(settings, depth)
    engine.add(*requests)
    return engine.drain()


BATCH = (request(0, 37, 9), request(1, 1, 5), request(2, 64, 1), request(3, 16, 12), request(4, 5, 7))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64, WHOLE])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_outputs_do_not_depend_on_chunks_depth_or_placement(placement, chunk_tokens, depth):
    outcomes = run(
        config(placement=placement, chunk_tokens=chunk_tokens, growth_limit_tokens=8, kvp=3), *BATCH, depth=depth
    )
    assert {key: outcome.token_ids for key, outcome in outcomes.items()} == {
        asked.id: expected_output(asked) for asked in BATCH
    }
    assert {outcome.finish_reason for outcome in outcomes.values()} == {"length"}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_kv_tokens_at_the_end_follow_the_closed_form(placement, depth):
    settings = config(placement=placement, growth_limit_tokens=8, kvp=3)
    engine = Engine(settings, depth)
    engine.add(*BATCH)
    for key, outcome in engine.drain().items():
        asked = BATCH[key]
        length = len(asked.prompt_token_ids) + len(outcome.token_ids) - 1
        held = engine.runner.ended[key]
        assert outcome.kv_tokens_per_rank == tuple(held.local_length(rank, length, 4) for rank in range(3))


def test_the_prompt_comes_in_chunks_of_the_budget():
    engine = Engine(config(chunk_tokens=16))
    engine.add(request(0, 37, 2))
    engine.drain()
    chunks = [(chunk.num_tokens, chunk.sample) for step in engine.runner.steps for chunk in step.chunks]
    assert chunks == [(16, False), (16, False), (5, True)]
    assert [step.work.decode_rows for step in engine.runner.steps] == [0, 0, 0, 1, 0]


def test_one_step_mixes_decodes_with_chunks_of_several_prompts():
    engine = Engine(config(chunk_tokens=16))
    engine.add(request(0, 3, 8))
    engine.step()
    engine.add(request(1, 10), request(2, 10))
    engine.step()
    mixed = engine.runner.steps[-1]
    assert mixed.changes.joining == (0,)
    assert [(chunk.id, chunk.num_tokens, chunk.sample) for chunk in mixed.chunks] == [(1, 10, True), (2, 6, False)]
    assert mixed.work.rows == 17
    engine.drain()


def test_requests_start_first_come_first_served():
    engine = Engine(config(num_blocks=12, max_running=3), depth=2)
    asked = [request(index, 5 + 7 * (index % 4), 3) for index in range(12)]
    engine.add(*asked)
    engine.drain()
    assert [new.id for step in engine.runner.steps for new in step.changes.new] == list(range(12))


def test_a_small_request_does_not_overtake_a_large_one_that_waits():
    engine = Engine(config(kvp=1, num_blocks=10))
    engine.add(request(0, 20, 5), request(1, 30, 5), request(2, 1, 1))
    engine.step()
    assert list(engine.runner.replicas) == [0]
    engine.drain()
    assert [new.id for step in engine.runner.steps for new in step.changes.new] == [0, 1, 2]


def test_a_request_waits_for_a_full_pool_and_runs_later():
    engine = Engine(config(kvp=2, num_blocks=3))
    asked = (request(0, 20, 4), request(1, 20, 4))
    engine.add(*asked)
    while engine.outcomes[0].finish_reason is None:
        assert not engine.outcomes[1].token_ids
        assert 1 not in engine.runner.replicas
        engine.step()
    outcomes = engine.drain()
    assert [outcomes[key].token_ids for key in (0, 1)] == [expected_output(one) for one in asked]


def test_no_more_requests_run_than_max_running():
    engine = Engine(config(max_running=2))
    engine.add(*(request(index, 4, 3) for index in range(5)))
    engine.step()
    assert list(engine.runner.replicas) == [0, 1]
    engine.drain()


def test_a_requests_whole_prompt_is_set_aside_at_admission_and_its_answer_as_it_grows():
    engine = Engine(config(kvp=2, num_blocks=100, chunk_tokens=4))
    engine.add(request(0, 21, 12))
    engine.step()
    assert engine.free_blocks() == [97, 97]  # 6 blocks over 2 ranks, of which it has one
    free = {tuple(engine.free_blocks())}
    while engine.outcomes[0].finish_reason is None:
        engine.step()
        free.add(tuple(engine.free_blocks()))
    assert free == {(97, 97), (96, 97), (96, 96), (100, 100)}  # 32 tokens get KV: the last one never does
    engine.drain()


def test_short_striped_requests_start_on_different_ranks():
    engine = Engine(config(kvp=4, block_tokens=16))
    engine.add(*(request(index, 5, 3) for index in range(8)))
    engine.drain()
    starts = [engine.runner.first_blocks[index] for index in range(8)]
    assert sorted(starts[:4]) == sorted(starts[4:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_ends_a_request_and_is_not_part_of_its_output(depth):
    full = expected_output(request(0, 10, 20))
    stop = full[6]
    asked = (request(0, 10, 20, stop=[stop]), request(1, 10, 20, first=7))
    engine = Engine(config(), depth)
    engine.add(*asked)
    outcomes = engine.drain()
    assert outcomes[0].token_ids == full[: full.index(stop)]
    assert outcomes[0].finish_reason == "stop"
    assert outcomes[1].token_ids == expected_output(asked[1])
    assert outcomes[1].finish_reason == "length"


def test_a_stop_token_has_no_kv_but_all_before_it_have():
    full = expected_output(request(0, 10, 20))
    stop = full.index(full[6])
    outcome = run(config(), request(0, 10, 20, stop=[full[6]]))[0]
    assert sum(outcome.kv_tokens_per_rank) == 10 + stop


def test_tokens_that_ran_on_after_a_stop_token_are_dropped():
    full = expected_output(request(0, 10, 20))
    one = Engine(config(), depth=1)
    three = Engine(config(), depth=3)
    for engine in (one, three):
        engine.add(request(0, 10, 20, stop=[full[6]]))
        engine.drain()
    assert three.num_sampled == one.num_sampled + 2
    assert three.outcomes == one.outcomes


def test_an_ended_request_frees_its_blocks_at_once():
    engine = Engine(config(), depth=3)
    engine.add(request(0, 10, 20, stop=[expected_output(request(0, 10, 20))[0]]))
    engine.step()
    assert engine.outcomes[0].finish_reason == "stop"
    assert engine.free_blocks() == [100, 100]
    engine.drain()


def test_aborting_a_waiting_request_leaves_no_trace():
    engine = Engine(config(max_running=1))
    engine.add(request(0, 4, 4), request(1, 4, 4), request(2, 4, 4))
    engine.step()
    assert engine.abort(1) == (0, 0)
    outcomes = engine.drain()
    assert outcomes[1] == Outcome([], "abort", (0, 0))
    assert [new.id for step in engine.runner.steps for new in step.changes.new] == [0, 2]
    assert all(1 not in step.changes.ended for step in engine.runner.steps)


def test_aborting_during_prefill_frees_all_blocks():
    engine = Engine(config(chunk_tokens=16))
    engine.add(request(0, 40, 4))
    engine.step()
    assert engine.abort(0) == (8, 8)
    assert engine.free_blocks() == [100, 100]
    outcomes = engine.drain()
    assert outcomes[0].token_ids == []
    assert engine.runner.steps[-1].changes.ended == (0,)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborting_during_decode_frees_all_blocks(depth):
    engine = Engine(config(), depth)
    asked = (request(0, 10, 20), request(1, 9, 30))
    engine.add(*asked)
    for _ in range(5):
        engine.step()
    held = engine.abort(0)
    assert held is not None
    assert sum(held) == 10 + 5 - 1
    outcomes = engine.drain()
    assert outcomes[0].token_ids == expected_output(asked[0])[:5]
    assert outcomes[1].token_ids == expected_output(asked[1])


def test_aborting_twice_or_an_unknown_request_does_nothing():
    engine = Engine(config())
    engine.add(request(0, 4, 4))
    engine.step()
    assert engine.abort(0) is not None
    assert engine.abort(0) is None
    assert engine.abort(99) is None
    engine.drain()
    assert engine.abort(0) is None


def test_blocks_of_an_aborted_request_serve_the_next_one():
    engine = Engine(config(kvp=1, num_blocks=6), depth=3)
    asked = (request(0, 12, 12), request(1, 12, 12))
    engine.add(*asked)
    for _ in range(4):
        engine.step()
    engine.abort(0)
    assert engine.drain()[1].token_ids == expected_output(asked[1])


def test_has_work_until_workers_have_heard_of_every_end():
    engine = Engine(config())
    engine.add(request(0, 4, 1))
    engine.step()
    assert engine.outcomes[0].finish_reason == "length"
    assert engine.loop.has_work
    engine.step()
    assert engine.runner.steps[-1].changes.ended == (0,)
    assert engine.runner.steps[-1].work.rows == 0
    assert not engine.loop.has_work


def test_an_empty_loop_has_nothing_to_do():
    engine = Engine(config())
    assert not engine.loop.has_work
    assert engine.loop.step() is None


def refusal(settings: SchedulerConfig, asked: Request) -> UserError:
    scheduler = Scheduler(settings)
    with pytest.raises(UserError) as caught:
        scheduler.add(asked)
    assert not scheduler.has_work
    return caught.value


def test_an_empty_prompt_is_refused():
    error = refusal(config(), request(0, 0))
    assert error.code == "empty_prompt"
    assert "give at least one token" in str(error)


def test_a_prompt_that_exceeds_the_context_is_refused_with_values_that_work():
    settings = config(max_model_len=100)
    error = refusal(settings, request(0, 90, 11))
    assert error.code == "context_length_exceeded"
    found = re.search(r"--max-new-tokens to at most (\d+), or --max-model-len to at least (\d+)", str(error))
    assert found.groups() == ("10", "101")
    Scheduler(settings).add(request(0, 90, 10))
    Scheduler(replace(settings, max_model_len=101)).add(request(0, 90, 11))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_prompt_that_exceeds_the_pool_is_refused_with_a_size_that_works(placement):
    settings = config(num_blocks=3, placement=placement, growth_limit_tokens=8)
    error = refusal(settings, request(0, 90, 11))
    assert error.code == "kv_cache_exceeded"
    tokens = int(re.search(r"--kv-cache-tokens to at least (\d+)", str(error))[1])
    num_blocks = -(-tokens // (settings.block_tokens * settings.kvp))
    Scheduler(replace(settings, num_blocks=num_blocks)).add(request(0, 90, 11))
    assert refusal(replace(settings, num_blocks=num_blocks - 1), request(0, 90, 11)).code == "kv_cache_exceeded"


@given(
    kvp=st.integers(1, 4),
    num_blocks=st.integers(1, 12),
    max_model_len=st.integers(2, 200),
    placement=st.sampled_from((*PLACEMENTS, "auto")),
    growth_limit_tokens=st.sampled_from((4, 8, 40)),
    kvp_threshold_tokens=st.integers(0, 60),
    share=st.floats(0, 1),
)
def test_the_longest_request_fits_whatever_its_prompt_is(max_model_len, share, **settings):
    made = config(max_model_len=max_model_len, **settings)
    longest = made.longest_request_tokens
    prompt_tokens = 1 + int(share * (longest - 2))
    Scheduler(made).add(request(0, prompt_tokens, longest - prompt_tokens))
    refusal(made, request(0, 1, longest))


def test_a_request_that_fills_the_pool_to_the_last_token_runs():
    asked = request(0, 15, 2)
    assert run(config(kvp=2, num_blocks=2), asked)[0].token_ids == expected_output(asked)


@pytest.mark.parametrize("name", ["num_blocks", "max_model_len", "block_tokens", "chunk_tokens", "max_running"])
def test_a_setting_below_one_is_refused(name):
    with pytest.raises(UserError, match=f"{name} is 0: set it to an integer from 1"):
        config(**{name: 0})


def test_an_unknown_placement_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="'random' is not known: use one of striped, growing, local, auto"):
        config(placement="random")


def test_a_growth_limit_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(UserError, match="multiple of the KV block"):
        config(placement="growing", growth_limit_tokens=6)


@st.composite
def workloads(draw):
    """A pool just large enough for the largest request, and a few requests with stop tokens and aborts."""
    asked = [
        request(
            index,
            draw(st.integers(1, 40)),
            draw(st.integers(1, 12)),
            stop=draw(st.sets(st.integers(0, VOCAB - 1), max_size=5)),
        )
        for index in range(draw(st.integers(1, 6)))
    ]
    block_tokens = draw(st.integers(1, 6))
    settings = scheduler_config(
        kvp=draw(st.integers(1, 4)),
        num_blocks=1,
        max_model_len=64,
        block_tokens=block_tokens,
        chunk_tokens=draw(st.sampled_from([1, 7, 16, WHOLE])),
        max_running=draw(st.integers(1, 4)),
        placement=draw(st.sampled_from((*PLACEMENTS, "auto"))),
        growth_limit_tokens=block_tokens * draw(st.integers(1, 3)),
        kvp_threshold_tokens=draw(st.integers(0, 50)),
    )
    largest = max(one.capacity_tokens - 1 for one in asked)
    places = [settings.place(len(one.prompt_token_ids), one.capacity_tokens, start=0) for one in asked]
    longest = max(place.local_length(rank, largest) for place in places for rank in range(settings.kvp))
    num_blocks = max(-(-longest // block_tokens), 1) + draw(st.integers(0, 4))
    aborts = draw(st.dictionaries(st.integers(0, 40), st.integers(0, len(asked) - 1), max_size=3))
    return replace(settings, num_blocks=num_blocks), asked, aborts, draw(st.integers(1, 4))


@given(workload=workloads())
def test_any_workload_gives_each_request_its_own_output_and_leaves_nothing(workload):
    settings, asked, aborts, depth = workload
    engine = Engine(settings, depth)
    engine.add(*asked)
    count = 0
    while engine.loop.has_work:
        if count in aborts:
            engine.abort(aborts[count])
        if engine.loop.has_work:
            engine.step()
        count += 1
    engine.assert_nothing_is_left()
    for one in asked:
        outcome, expected = engine.outcomes[one.id], expected_output(one)
        if outcome.finish_reason == "abort":
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == expected
            stopped = len(expected) < one.sampling.max_new_tokens
            assert outcome.finish_reason == ("stop" if stopped else "length")


def placed(settings, *asked):
    """Each request's owners at its end, and whether all ranks took part from the start."""
    engine = Engine(settings, depth=1)
    engine.add(*asked)
    held = {}
    while engine.loop.has_work:
        for seq in engine.runner.replicas.values():
            held[seq.new.id] = {block.owner for block in seq.blocks}
        engine.step()
    return [(held[one.id], engine.runner.new[one.id].kv.spread) for one in asked]


def test_a_request_is_placed_by_its_lengths():
    """Threshold 24: a short request stays on a rank, one that outgrows it takes one more, a long one has all."""
    settings = config(kvp=3, placement="auto", kvp_threshold_tokens=24, num_blocks=64)
    short, growing, long = request(0, 16, 8), request(1, 16, 20), request(2, 25, 4)
    (short_ranks, short_spread), (growing_ranks, growing_spread), (long_ranks, long_spread) = placed(
        settings, short, growing, long
    )
    assert (len(short_ranks), len(growing_ranks), len(long_ranks)) == (1, 2, 3)
    assert (short_spread, growing_spread, long_spread) == (False, False, True)


@pytest.mark.parametrize(
    ("threshold_tokens", "name"), [(0, "striped"), (9, "striped"), (10, "growing"), (19, "growing"), (20, "local")]
)
def test_the_threshold_counts_the_prompt_and_what_may_come(threshold_tokens, name):
    settings = config(placement="auto", kvp_threshold_tokens=threshold_tokens)
    assert settings.placement_of(prompt_tokens=10, capacity_tokens=20) == name


def test_short_requests_take_turns_over_the_ranks():
    settings = config(kvp=3, placement="auto", kvp_threshold_tokens=1000, num_blocks=64)
    ranks = [ranks for ranks, _ in placed(settings, *(request(index, 12, 4) for index in range(6)))]
    assert sorted(rank for held in ranks for rank in held) == [0, 0, 1, 1, 2, 2]


def test_ranks_prefill_their_own_prompts_side_by_side():
    """Two prompts on two ranks and a spread one share a chunk's budget; what one leaves goes to the oldest."""
    engine = Engine(config(kvp=2, placement="auto", kvp_threshold_tokens=40, chunk_tokens=30, num_blocks=64))
    engine.add(request(0, 30, 4), request(1, 6, 4), request(2, 90, 4))
    engine.step()
    assert {chunk.id: chunk.num_tokens for chunk in engine.runner.steps[-1].chunks} == {0: 14, 1: 6, 2: 10}


@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
@pytest.mark.parametrize("threshold_tokens", [0, 7, 100])
def test_no_request_needs_more_of_a_rank_than_the_longest(placement, threshold_tokens):
    settings = config(
        kvp=3, placement=placement, kvp_threshold_tokens=threshold_tokens, growth_limit_tokens=8, max_model_len=60
    )
    needed = [
        settings.place(prompt, capacity, start=0).local_length(rank, capacity)
        for capacity in range(1, 61)
        for prompt in range(1, capacity + 1)
        for rank in range(3)
    ]
    assert settings.longest_local_tokens == max(needed)


class Counted(Request):
    """Counts how often its id is asked for."""

    asked = 0

    def __getattribute__(self, name):
        if name == "id":
            Counted.asked += 1
        return super().__getattribute__(name)


def test_cancelling_a_request_in_the_queue_looks_at_no_other():
    scheduler = Scheduler(config(max_running=1))
    sampling = SamplingParams(max_new_tokens=1)
    for request_id in range(2_000):
        scheduler.add(Counted(request_id, array("i", [1]), sampling, frozenset(), 0, 0.0))
    Counted.asked = 0
    assert [scheduler.end(request_id) for request_id in range(1_999, 999, -1)] == [Usage((0, 0))] * 1_000
    assert scheduler.end(1_500) is None
    assert Counted.asked == 0
    assert [new.id for new in scheduler.schedule(0.0).changes.new] == [0]


def test_a_failed_token_ends_its_request_alone_and_frees_its_blocks():
    scheduler = Scheduler(config())
    for request_id in (1, 2):
        scheduler.add(request(request_id, 3, 5))
    step = scheduler.schedule(0.0)
    events = scheduler.complete(
        StepResult(step.id, (SampledToken(1, 0, error="ValueError: no"), SampledToken(2, 7)), step.work.rows)
    )
    assert [(event.request_id, event.finish_reason) for event in events] == [(1, "error"), (2, None)]
    assert events[0].sampled.error == "ValueError: no"
    assert sum(events[0].usage.kv_tokens_per_rank) == 3  # the prompt's
    step = scheduler.schedule(0.0)
    assert step.changes.ended == (1,)
    assert (step.changes.joining, step.work.decode_rows, step.chunks) == ((2,), 1, ())
    (event,) = scheduler.complete(StepResult(step.id, (SampledToken(2, 0, error="ValueError: no"),), 1))
    assert sum(event.usage.kv_tokens_per_rank) == 4  # that of the token before the one that failed as well
    assert [allocator.available for allocator in scheduler.pool.allocators] == [100, 100]
