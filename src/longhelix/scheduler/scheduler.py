"""The scheduler: makes steps from requests (continuous batching).

It alone decides about admission, blocks, chunks, parts, preemption and ends. Workers keep their own copy of every
sequence, so the scheduler can plan the next step without the values of sampled tokens, and several steps may be in
flight. Only sequences with draft tokens wait for the result of their last step (`Drafting`).
"""

import math
from array import array
from collections.abc import Callable, Collection, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from longhelix.scheduler.admission import MOST_PREEMPTIONS, Admission
from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.cache_record import CacheRecord
from longhelix.scheduler.chunk_rule import AdaptiveChunks, ChunkRule, FixedChunks
from longhelix.scheduler.compiled_guides import CompiledGuides
from longhelix.scheduler.config import DEFAULT_TBT_S, SchedulerConfig
from longhelix.scheduler.corrected_cost import CorrectedCost
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.drafting import Drafter, Drafting
from longhelix.scheduler.growth_limits import GrowthLimits
from longhelix.scheduler.instances import Instances, tokens_within
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.load import AnyLoad
from longhelix.scheduler.microbatches import Microbatches
from longhelix.scheduler.order import Order
from longhelix.scheduler.pending_changes import PendingChanges
from longhelix.scheduler.pinned_prefix import PinnedPrefix
from longhelix.scheduler.policy import Policy, make_policy
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.prefix import PrefixCache, Prefixes
from longhelix.scheduler.request import Request
from longhelix.scheduler.sequence import Job, Sequence
from longhelix.scheduler.shares import Shares
from longhelix.scheduler.step import (
    BlockTransfers,
    Chunk,
    Draft,
    PromptLogprobs,
    SampledToken,
    Scored,
    SequenceChanges,
    Step,
    StepResult,
    Turn,
)
from longhelix.scheduler.token_event import TokenEvent, Usage
from longhelix.scheduler.turns import Turns
from longhelix.scheduler.widening import Widening
from longhelix.scheduler.work import Cost

_LEAST_TTFT_S = 1.0  # of deadlines that the request does not set
_MARGIN = 0.85  # of targets, because every second step takes longer than predicted
# A request's target is at least this multiple of the decodes' time alone, and at least a millisecond (our choice).
_TBT_FACTOR, _LEAST_TBT_S = 2.0, 1e-3


class _Drafted(NamedTuple):
    """The tokens of a sequence's draft, and the new KV blocks that they need."""

    seq: Sequence
    token_ids: "array[int]"
    new_blocks: tuple[Block, ...]


class Scheduler:
    """Makes the steps of an engine. Call `schedule` and `complete` in the order of steps.

    Args:
        cost: Predicts the time of steps. Without it, deadlines count tokens, and chunks cannot adapt.
        policy: Decides which request goes next. Default: the policy that the settings name.
        chunk_rule: Decides how many prompt tokens a step computes.
        cut: Decides in how many parts a step attends. None if ranks cannot exchange while they compute.
        prefixes: Finds prefixes whose KV is cached. Default: the prefix cache, if it is enabled.
        root: Returns everything that a request's KV depends on, except for its tokens.
        swap_s: Seconds to swap a KV block out and in. Blocks that are faster to compute again are not swapped.
        record: Records what the prefix cache stores and removes (`BlockPool.changes`).
        drafter: Guesses the next tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: Cost | None = None,
        policy: Policy | None = None,
        chunk_rule: ChunkRule | None = None,
        cut: Cut | None = None,
        prefixes: Prefixes | None = None,
        root: Callable[[Request], bytes] = lambda request: b"",
        swap_s: float = 0.0,
        record: CacheRecord | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self._times = PrefillTimes(cost, config.kvp)
        self._swap_s = swap_s
        self.pool = BlockPool(config, self._swap_pays, record)
        self.cost = None if cost is None else CorrectedCost(cost)
        self._chunk_rule = _chunk_rule(config, self.cost) if chunk_rule is None else chunk_rule
        self._cut = None if config.steps.own_clocks else cut  # instances exchange only for sequences that they share
        self._shares = Shares(config.service.client_weights)
        self._order = Order(make_policy(config.service.policy) if policy is None else policy, self._shares, self._times)
        self._cache: PrefixCache | None = None
        if config.cache.prefix_cache and prefixes is None:
            prefixes = self._cache = PrefixCache(
                index=self.pool.index,
                swapped=self.pool.swaps.index,
                matches=self.pool.matches,
                block_tokens=config.block_tokens,
                root=_root(config, root),
                record=record,
                windows=self.pool.windows,
            )
        limits = GrowthLimits(config, cost)
        self._guides = CompiledGuides(config.clocks)
        self._waiting = Admission(
            config=config,
            pool=self.pool,
            order=self._order,
            limits=limits,
            prefixes=prefixes,
            cache=self._cache,
            guides=self._guides,
        )
        self._running: dict[int, Sequence] = {}
        self._prompts: dict[int, Sequence] = {}  # those with prompt tokens to compute
        self._preempted: dict[int, Sequence] = {}  # whose last tokens have not come back
        self._changes = PendingChanges()
        self._turns: Turns = (
            Instances(config, self.pool, self._changes)
            if config.steps.own_clocks
            else Microbatches(config.steps.pp, config.kvp, config.block_tokens, cost)
        )
        self._drafting = Drafting(drafter, config.steps.pp)
        self._widening = Widening(config, self.pool)
        self._leaving: list[Sequence] = []  # the next step of their ranks says so
        self._chunked: list[Sequence] = []  # sequences with a chunk in the last step
        self._next_step_id = 0
        self._step_s = 0.0  # seconds of the last step with chunks
        self._in_flight: dict[int, Step] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._preempted or self._changes.has_ends)

    @property
    def running(self) -> Collection[Sequence]:
        """The admitted requests, to be read only."""
        return self._running.values()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def check(self, request: Request) -> None:
        """Raise UserError if a request could never run."""
        self._waiting.check(request)

    def add(self, request: Request, hashes: Items[bytes] = ()) -> None:
        """Queue a request. Raises UserError if it could never run.

        hashes: content hashes of its first blocks, if they are known (see the method `hashes`).
        """
        self.check(request)
        self._waiting.push(self._job(request), request.arrival_s, hashes)

    def _job(self, request: Request) -> Job:
        prefill_s = self._prefill_s(request)
        ttft_s = request.service.ttft_slo_s
        if ttft_s is None:
            ttft_s = max(_LEAST_TTFT_S, self.config.service.slo_scale * prefill_s)
        return Job(request, request.arrival_s + ttft_s, prefill_s)

    def _prefill_s(self, request: Request) -> float:
        return self._times.until(len(request.prompt_token_ids), self._waiting.place(request).alone_tokens)

    def hashes(self, request: Request) -> list[bytes]:
        """See `PrefixCache.hashes`."""
        return self._waiting.hashes(request)

    def pin_prefix(self, request: Request, hashes: Items[bytes]) -> PinnedPrefix | None:
        """See `Admission.pin_prefix`."""
        return self._waiting.pin_prefix(request, hashes)

    def prefilled_tokens(self, request_id: int) -> int:
        """Return how many of a request's prompt tokens are in steps. 0 while it waits or after its end."""
        seq = self._running.get(request_id)
        return 0 if seq is None else min(seq.length, seq.request.given_tokens)

    def has_begun(self, request_id: int) -> bool:
        """Return whether the ranks have been given steps of a request that has not ended."""
        seq = self._running.get(request_id)
        return request_id in self._preempted if seq is None else not self._changes.is_new(seq)

    def schedule(self, now_s: float, busy: Set[int] = frozenset()) -> Step | None:
        """Make the next step. Returns None if there is nothing to run now.

        A step has one row of every decoding sequence (of one microbatch, or of one team of instances), drafts, and
        chunks of prompts.

        Args:
            now_s: The time on the engine's clock.
            busy: Instances that cannot be given a step now.
        """
        if not self._turns.may_begin(busy):
            return None
        self._widening.name_moved()
        self._free_expired()
        self._resume(now_s)
        self._admit(now_s)
        turn, decoding, decode_next, growing = self._turn(busy)
        if turn is None:
            return None
        joined = self._changes.take_joined(turn)
        grown, drafted = self._grow(growing, self._drafting.ready(turn), now_s)
        load = self._turns.load(turn)
        drafts = tuple(self._draft(*draft, load) for draft in drafted)
        chunks = self._chunks(turn, load, now_s)
        self.pool.give_back(turn)
        if not (load.has_decodes or chunks or self._changes.has_ends_for(turn)):
            return None
        work = load.fullest(self.cost)
        if self._cut is not None:
            work = work._replace(parts=self._cut.parts(work))
        most_blocks = max([decodes.most_blocks for decodes in decoding], default=0)
        segments = drafts + chunks
        if segments:
            most_blocks = max(most_blocks, *(self._running[segment.id].kv.most_blocks for segment in segments))
        joining = self._still_running(decode_next)
        leaving = self._still_running([seq for seq in self._leaving if turn.has(seq.schedule.instances)])
        self._leaving = [seq for seq in self._leaving if not turn.has(seq.schedule.instances)]
        new, copies = self._changes.take_started(turn)
        self._guides.heard(new)
        joined = tuple(member for member in joined if member.id in self._running)
        joined_ids = [member.id for member in joined if self._running[member.id] in self._turns]
        joining += tuple(id for id in joined_ids if id not in joining)
        self._next_step_id += 1
        swapped_out, swapped_in = self.pool.swaps_of_step(turn)
        step = Step(
            self._next_step_id,
            turn=turn,
            changes=SequenceChanges(
                new=new,
                ended=self._changes.take_ended(turn),
                joining=joining,
                leaving=leaving,
                grown=grown,
                rebalances=self._widening.of_step(),
                joined=joined,
            ),
            drafts=drafts,
            chunks=chunks,
            transfers=BlockTransfers(copies=copies, swapped_out=swapped_out, swapped_in=swapped_in),
            most_tokens=most_blocks * self.config.block_tokens,
            work=work,
        )
        self._in_flight[step.id] = step
        self._turns.began(turn, step.id)
        return step

    def _free_expired(self) -> None:
        """Free the blocks of windows that have expired with the chunks of the last step."""
        for seq in self._chunked:
            if self._running.get(seq.id) is seq:
                self.pool.free_expired(seq)
        self._chunked.clear()

    def _swap_pays(self, start: int) -> bool:
        """Return whether swapping the KV block that starts at position `start` is faster than computing it again."""
        stop = start + self.config.block_tokens
        return self._swap_s < self._times.between(start, stop, self.config.place(stop, stop + 1, 0).alone_tokens)

    def _still_running(self, sequences: Items[Sequence]) -> tuple[int, ...]:
        return tuple(seq.id for seq in sequences if self._running.get(seq.id) is seq)

    def _admit(self, now_s: float) -> None:
        for started in self._waiting.admit(now_s, len(self._running)):
            seq = started.seq
            self._running[seq.id] = self._prompts[seq.id] = seq
            self._changes.add_started(started)
            self._turns.begin(seq)

    def _turn(self, busy: Set[int]) -> tuple[Turn | None, Items[Decodes], list[Sequence], list[Sequence]]:
        """Decide whose step is next.

        Returns:
            The turn (None: there is nothing to run), the sets of sequences that have rows in the step, the sequences
            that join these sets, and those whose rows need a KV block.
        """
        self._leaving += self._turns.deal()
        step_id, oldest_id = self._next_step_id + 1, self._oldest_id
        with_segments = [*self._prompts.values(), *self._drafting.ready(Turn())]
        for turn in self._turns.in_turn(step_id, oldest_id, busy, with_segments):
            joined, growing = self._turns.join(turn, step_id, oldest_id), list[Sequence]()
            decoding = self._turns.decoding(turn)
            for decodes in decoding:
                done, decoding_growing = decodes.advance()
                self._leaving += done
                growing += decoding_growing
            if (
                any(turn.has(seq.schedule.instances) for seq in with_segments)
                or any(map(len, decoding))
                or self._changes.has_ends_for(turn)
            ):
                return turn, decoding, joined, growing
        return None, (), [], []

    @property
    def _oldest_id(self) -> int:
        """Id of the oldest step in flight. If there is none, of the next step."""
        return next(iter(self._in_flight), self._next_step_id + 1)

    def _grow(
        self, growing: list[Sequence], drafting: list[Sequence], now_s: float
    ) -> tuple[tuple[tuple[int, Block], ...], list[_Drafted]]:
        """Take KV blocks for decoding sequences whose next rows need them, and for drafts.

        If there is no block for a sequence's first row, a request is preempted. Draft tokens get blocks only while each
        rank has a free block per running request.

        Returns:
            The new blocks with the ids of their sequences, and the drafts.
        """
        grown: list[tuple[Sequence, tuple[Block, ...]]] = []
        for seq in growing:
            blocks = self._take(seq, now_s)
            if blocks:
                self._turns.grew(seq)
                grown.append((seq, blocks))
        with_block = [
            (seq, () if seq.kv.num_blocks * self.config.block_tokens > seq.length else self._take(seq, now_s))
            for seq in drafting
            if seq in self._drafting  # otherwise, it was preempted just now
        ]
        drafted: list[_Drafted] = []
        for seq, blocks in with_block:
            if seq in self._drafting:
                token_ids = self._drafting.token_ids(seq)
                blocks += self.pool.take_free(seq, seq.length + len(token_ids), spare=len(self._running))
                room = seq.kv.num_blocks * self.config.block_tokens - seq.length
                drafted.append(_Drafted(seq, token_ids[:room], blocks))
        return (
            tuple((seq.id, block) for seq, blocks in grown if seq in self._turns for block in blocks),
            [draft for draft in drafted if draft.seq in self._drafting],
        )

    def _take(self, seq: Sequence, now_s: float) -> tuple[Block, ...]:
        """Take the next KV block of a decoding sequence. Empty if the sequence had to be preempted."""
        self.pool.choose_ranks(seq, seq.kv.num_blocks + 1)
        blocks = None
        while blocks is None and (seq in self._turns or seq in self._drafting):
            blocks = self.pool.take(seq)
            if blocks is None:
                self._free_some(self.pool.next_owner(seq), seq, now_s)
        return blocks or ()

    def _draft(self, seq: Sequence, token_ids: "array[int]", new_blocks: tuple[Block, ...], load: AnyLoad) -> Draft:
        """Return a draft, and add it to the step's load."""
        load.add_draft(seq, len(token_ids))
        self._drafting.submit(seq)
        return Draft(seq.id, seq.length, token_ids.tobytes(), new_blocks)

    def _free_some(self, rank: int, growing: Sequence, now_s: float) -> None:
        """Make room for a sequence whose next block goes to a full KVP rank: move blocks, or preempt a request."""
        # Blocks of a sequence with draft tokens change with its next draft, so they do not move.
        if self._widening.widen(rank, growing, (seq for seq in self._running.values() if seq in self._turns)):
            self._turns.recount()
        else:
            self._preempt(self._victim(rank, growing, now_s))

    def _victim(self, rank: int, growing: Sequence, now_s: float) -> Sequence:
        """Return the sequence to preempt: `growing`, or one that has blocks or reservations on a KVP rank.

        It is one of the lowest priority. Among these, the policy decides.
        """
        on_rank = (seq for seq in self._running.values() if seq.kv.block_ids[rank] or seq.kv.reserved[rank])
        return min(
            (seq for seq in (growing, *on_rank) if self._may_be_preempted(seq)),
            key=lambda seq: self._order.preemption(seq, self._lost_s(seq), now_s),
        )

    def _lost_s(self, seq: Sequence) -> float:
        return self._times.until(seq.known_length, seq.kv.placement.alone_tokens)

    def _may_be_preempted(self, seq: Sequence) -> bool:
        """Return whether a sequence may be preempted.

        It may not if no rank knows it yet, if only its last token has to come back, or if it has been preempted so
        often that all blocks that it needs are reserved.
        """
        runs = seq.prompt_left > 0 or seq in self._drafting or self._turns.may_lose(seq)
        return runs and not self._changes.is_new(seq) and seq.job.history.preemptions < MOST_PREEMPTIONS

    def _preempt(self, seq: Sequence) -> None:
        """Release a sequence's blocks. Once there is room for it, it is computed again from the tokens that it has."""
        self._leave(seq)
        seq.schedule.last_step = self._next_step_id
        self._preempted[seq.id] = seq

    def _leave(self, seq: Sequence) -> None:
        """Stop running a sequence. The next step tells the ranks."""
        del self._running[seq.id]
        if self._prompts.pop(seq.id, None) is not None:
            self._shares.remove(seq.request.service.client)
        self._turns.leave(seq)
        self._drafting.leave(seq)
        self._widening.forget(seq)
        self._guides.end(seq.id)
        self.pool.release(seq)
        unused = self._changes.add_ended(seq)
        if unused:
            self.pool.give_back_unused(tuple(source for source, _ in unused))

    def _resume(self, now_s: float) -> None:
        """Queue preempted requests again, once all of their tokens have come back and all ranks know."""
        for seq in [seq for seq in self._preempted.values() if self._has_come_back(seq)]:
            del self._preempted[seq.id]
            request, history = seq.request.resumed(seq.tokens.output), seq.job.history
            history = replace(history, preemptions=history.preemptions + 1, lost_tokens=seq.known_length)
            job = replace(seq.job, request=request, prefill_s=self._prefill_s(request), history=history)
            self._waiting.push(job, now_s)

    def _has_come_back(self, seq: Sequence) -> bool:
        schedule = seq.schedule
        if not schedule.instances:
            return schedule.last_step < self._oldest_id
        steps = (step for id, step in self._in_flight.items() if id <= schedule.last_step)
        is_in_flight = any(Turn(instances=step.turn.instances).has(schedule.instances) for step in steps)
        return not is_in_flight and seq.id not in self._changes.ended_ids

    def _chunks(self, turn: Turn, load: AnyLoad, now_s: float) -> tuple[Chunk, ...]:
        """Return the next chunks of prompts, and add them to the step's load."""
        prompts = [seq for seq in self._prompts.values() if turn.has(seq.schedule.instances)]
        if not prompts:
            return ()
        if len(prompts) > 1:
            # A prompt that is not in this step gets its token after the next one.
            later_s = now_s + 2 * self._step_s
            prompts = self._order.prompts(prompts, later_s)
        target_s = self._target_s(turn, load, prompts[0], now_s) if self._chunk_rule.adapts else math.inf
        sizes = self._chunk_rule.sizes(prompts, load, target_s)
        chunks = []
        for seq, num_tokens in zip(prompts, sizes, strict=False):
            if num_tokens:
                num_tokens = tokens_within(seq, num_tokens)
                self.pool.choose_ranks(seq, -(-(seq.length + num_tokens) // self.config.block_tokens))
                num_tokens = self.pool.tokens_within(seq, num_tokens)
                assert num_tokens, "a block is reserved for it"
                load.add_chunk(seq, num_tokens)
                chunks.append(self._chunk(seq, num_tokens))
        return tuple(chunks)

    def _target_s(self, turn: Turn, beside: AnyLoad, first: Sequence, now_s: float) -> float:
        """Return the time that the step may take. `first` is the prompt that goes first.

        A request's target has a lower bound. A request that asks for almost no time would hardly get its tokens sooner,
        and would delay the prompts of all other requests.

        A policy's headroom is a part of the time that decodes leave, not of the whole target (Medha's packer).
        Otherwise, decodes that take half of the target would leave no time to prompts that have slack.
        """
        decodes_s = beside.seconds(self.cost) if self.cost is not None and beside.has_decodes else 0.0
        least_s = max(_LEAST_TBT_S, _TBT_FACTOR * decodes_s)
        target_s = self.config.service.tbt_target_s
        if target_s is None:
            target_s = max(DEFAULT_TBT_S, least_s)
        asked_s = min(self._turns.tbt_slo_s(turn), self._drafting.tbt_slo_s(turn))
        target_s = _MARGIN * min(target_s, max(asked_s, least_s))
        return target_s - self._order.headroom_s(first, now_s, max(target_s - decodes_s, 0.0))

    def _chunk(self, seq: Sequence, num_tokens: int) -> Chunk:
        start, client = seq.length, seq.request.service.client
        token_ids = seq.request.prompt_token_ids[start : start + num_tokens].tobytes()
        scored = _scored_rows(seq, num_tokens) if seq.is_scored else None
        seq.length += num_tokens
        if self.pool.windows:
            self._chunked.append(seq)
        alone_s = self._times.between(start, seq.length, seq.kv.placement.alone_tokens)
        self._shares.charge(client, alone_s)
        self._order.pace.add(self._next_step_id + 1, alone_s)
        ends = not seq.prompt_left
        if ends:
            del self._prompts[seq.id]
            self._shares.remove(client)
            if seq.length < seq.schedule.num_rows:
                if self._drafting.handles(seq):
                    self._drafting.prompt_done(seq)
                else:
                    self._turns.prompt_done(seq, self._next_step_id + 1)
        new_blocks = self.pool.as_sent(seq, self.pool.take_needed(seq))
        if self._cache is not None:
            self.pool.name_of(seq, *self._cache.named(seq))
        return Chunk(seq.id, token_ids, new_blocks, sample=ends, scored=scored)

    def complete(self, result: StepResult) -> list[TokenEvent]:
        """Process the tokens of a step and return their events. Tokens of requests that have ended are dropped."""
        step = self._in_flight.pop(result.step_id)
        self._turns.ended(step.turn)
        if step.chunks:
            self._step_s = result.measured.taken_s
            self._order.pace.ended(step.id, result.measured.taken_s)
        for rebalance in step.changes.rebalances:
            seq = self._running.get(rebalance.id) or self._preempted.get(rebalance.id)
            if rebalance.moves and seq is not None:
                seq.job.history.moved_s += result.measured.moved_s
        # The cost does not include moves, nor the compilation of guides.
        has_guides = any(new.sampling.guide is not None for new in step.changes.new)
        if self.cost is not None and not step.moved and not has_guides:
            self.cost.observe(step.work, result.measured.taken_s)
        running = self._running
        events = [self._prompt_event(scores) for scores in result.prompt_logprobs if self._has(scores.sequence_id)]
        for sampled in result.sampled:
            id, token_id = sampled.sequence_id, sampled.token_id
            seq = running.get(id) or self._preempted.get(id)
            if seq is None:
                continue
            tokens = seq.tokens
            output = tokens.output
            output.append(token_id)
            if len(output) == tokens.next_look or token_id in tokens.stop_ids or sampled.error:
                events.append(self._look(seq, sampled))
            else:
                events.append(TokenEvent(id, sampled))
        for seq in self._drafting.take_result(step):
            self.pool.cut(seq, reserve_again=seq.job.history.preemptions >= MOST_PREEMPTIONS)
        return events

    def _has(self, request_id: int) -> bool:
        """Return whether a request that was in a step has not ended."""
        return request_id in self._running or request_id in self._preempted

    def _prompt_event(self, scores: PromptLogprobs) -> TokenEvent:
        id = scores.sequence_id
        if scores.error:
            return TokenEvent(id, SampledToken(id, 0, error=scores.error), "error", self.end(id))
        return TokenEvent(id, None, prompt_logprobs=scores.logprobs)

    def _look(self, seq: Sequence, sampled: SampledToken) -> TokenEvent:
        """Return the event of a token after which a block is full, or the request ends."""
        tokens = seq.tokens
        num_output = len(tokens.output)
        tokens.next_look = tokens.max_output
        if self._cache is not None:
            unfilled = -(tokens.num_prompt + num_output - 1) % self.config.block_tokens
            if not unfilled:
                self.pool.name_of(seq, *self._cache.named(seq))
            tokens.next_look = min(num_output + (unfilled or self.config.block_tokens), tokens.max_output)
        if sampled.error:
            return TokenEvent(seq.id, sampled, "error", self.end(seq.id))
        if not seq.request.sampling.max_new_tokens:
            return TokenEvent(seq.id, None, "length", self.end(seq.id))
        if sampled.token_id in tokens.stop_ids:
            return TokenEvent(seq.id, None, "stop", self.end(seq.id), ending=sampled)
        if num_output == tokens.max_output:
            return TokenEvent(seq.id, sampled, "length", self.end(seq.id))
        return TokenEvent(seq.id, sampled)

    def end(self, request_id: int) -> Usage | None:
        """Drop a request, waiting or running, and free its blocks.

        Returns the request's usage, or None if it has already ended.
        """
        seq = self._running.get(request_id)
        if seq is not None:
            self._leave(seq)
            length = seq.known_length
            rank_tokens = tuple(seq.kv.placement.local_length(rank, length) for rank in range(self.config.kvp))
            return Usage.of(seq.job, rank_tokens)
        preempted = self._preempted.pop(request_id, None)
        job = self._waiting.cancel(request_id) if preempted is None else preempted.job
        return None if job is None else Usage.of(job, (0,) * self.config.kvp)


def _scored_rows(seq: Sequence, num_tokens: int) -> Scored | None:
    """Return the scored rows of a sequence's next chunk, and count them as scored. None if there are none."""
    rows = seq.scored(num_tokens)
    if not rows:
        return None
    seq.job.history.scored_tokens = rows.stop
    return Scored(rows.start - seq.length, seq.request.prompt_token_ids[rows.start + 1 : rows.stop + 1].tobytes())


def _chunk_rule(config: SchedulerConfig, cost: Cost | None) -> ChunkRule:
    if not config.steps.adaptive:
        return FixedChunks(config.steps.chunk_tokens)
    assert cost is not None
    return AdaptiveChunks(cost, config.steps.chunk_tokens)


def _root(config: SchedulerConfig, root: Callable[[Request], bytes]) -> Callable[[Request], bytes]:
    """Return the root function of the prefix cache. If results must be batch-invariant, it includes the placement."""
    if not config.placement.batch_invariant:
        return root

    def placed(request: Request) -> bytes:
        limit_tokens = request.service.growth_limit_tokens
        return config.placement_of(request.given_tokens, request.capacity_tokens, limit_tokens).encode()

    return lambda request: root(request) + placed(request)
