"""The scheduler: requests in, Steps out. First come first served, fixed chunk size, continuous batching.

It is the only decision maker: admission, blocks, chunks, ends. It never needs a sampled token's value to plan the
next step, because workers keep their own copy of every sequence; so several steps may be in flight.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from longhelix.errors import UserError
from longhelix.kv.blocks import Block, BlockAllocator
from longhelix.kv.placement import Placement, make_placement, placement_by_length
from longhelix.request import MOST_TOKENS, NewSequence, Request, SampledToken, SequenceWork, Step, StepResult
from longhelix.values import flag, whole

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SchedulerConfig:
    """`num_blocks` is each KVP rank's pool, `chunk_tokens` the prompt tokens of one step over all requests.

    placement: the policy of all requests, or "auto": each one's by its length (`placement_by_length`), growing by
    `kvp_threshold_tokens` a rank. `batch_invariant`: every request that may spread begins on rank 0, because its merges
    add up in the order of the ranks.
    """

    kvp: int
    num_blocks: int
    max_model_len: int
    block_tokens: int = 16
    chunk_tokens: int = 512
    max_running: int = 64
    placement: str = "striped"
    growth_limit_tokens: int = 4096
    kvp_threshold_tokens: int = 0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_tokens", "chunk_tokens", "max_running"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, MOST_TOKENS))
        for name in ("growth_limit_tokens", "kvp_threshold_tokens"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 0, MOST_TOKENS))
        flag("batch_invariant", self.batch_invariant)
        self.place(1, 1, start=0)  # refuses a policy that cannot be

    def policy(self, prompt_tokens: int, capacity_tokens: int) -> str:
        """The name of a request's policy."""
        if self.placement != "auto":
            return self.placement
        return placement_by_length(prompt_tokens, capacity_tokens, self.kvp_threshold_tokens)

    def place(self, prompt_tokens: int, capacity_tokens: int, start: int) -> Placement:
        """A request's placement, beginning on KVP rank `start`."""
        limit_tokens = self.growth_limit_tokens
        if self.placement == "auto":
            limit_tokens = max(self.kvp_threshold_tokens // self.block_tokens, 1) * self.block_tokens
        policy = self.policy(prompt_tokens, capacity_tokens)
        return make_placement(policy, self.kvp, self.block_tokens, limit_tokens, start)

    @property
    def longest_local_tokens(self) -> int:
        """The most tokens of one request that a KVP rank may have to hold."""
        longest, short = self.max_model_len, min(self.kvp_threshold_tokens, self.max_model_len)
        requests = [(1, longest), (longest, longest), (min(1, short), short)]
        places = [(self.place(prompt, capacity, start=0), capacity) for prompt, capacity in requests]
        return max(place.local_length(rank, capacity) for place, capacity in places for rank in range(self.kvp))


@dataclass(frozen=True)
class TokenEvent:
    """A request's new token (None where a stop token ended it), and why it ended, if it did; `sampled.error` where that
    was an error.

    A request that ends here is gone; `kv_tokens_per_rank` says what it held.
    """

    request_id: int
    sampled: SampledToken | None
    finish_reason: FinishReason | None = None
    kv_tokens_per_rank: tuple[int, ...] = ()


@dataclass
class _Sequence:
    """A running request. `length` and `num_sampled` count what has been submitted, known or not.

    reserved: the KV blocks that each KVP rank still owes it. block_ids: those that it has there, in position order.
    """

    request: Request
    placement: Placement
    reserved: list[int]
    block_ids: "list[array[int]]"
    num_blocks: int = 0
    last_owner: int = 0
    length: int = 0
    num_sampled: int = 0
    num_output: int = 0

    @property
    def prompt_left(self) -> int:
        return max(len(self.request.prompt_token_ids) - self.length, 0)

    @property
    def home(self) -> int | None:
        """The rank that its prompt has to itself; None where all take part."""
        return None if self.placement.spread else self.placement.start

    @property
    def decodes(self) -> bool:
        return self.prompt_left == 0 and self.num_sampled < self.request.sampling.max_new_tokens


class Scheduler:
    """State + budget -> Step. `schedule` and `complete` are called in the order of steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._allocators = [BlockAllocator(config.num_blocks) for _ in range(config.kvp)]
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # cancelled anywhere at the cost of one
        self._running: dict[int, _Sequence] = {}
        self._ended: list[int] = []
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request; raises UserError where it could never run."""
        prompt, new = len(request.prompt_token_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise UserError("the prompt is empty: give at least one token", "empty_prompt")
        if prompt + new > self.config.max_model_len:
            room = self.config.max_model_len - prompt
            raise UserError(
                f"{prompt} prompt tokens plus {new} new tokens exceed --max-model-len {self.config.max_model_len}: "
                + (f"set --max-new-tokens to at most {room}, or " if room > 0 else "shorten the prompt, or set ")
                + f"--max-model-len to at least {prompt + new}",
                "context_length_exceeded",
            )
        needed = self._blocks_needed(request, self._place(request, start=0))
        if max(needed) > self.config.num_blocks:
            block_tokens = self.config.block_tokens
            raise UserError(
                f"{prompt} prompt tokens plus {new} new tokens need {max(needed) * block_tokens} tokens of KV cache on "
                f"one rank, but a rank's pool holds {self.config.num_blocks * block_tokens}: set --kv-cache-tokens to "
                f"at least {max(needed) * block_tokens * self.config.kvp}, or lower --max-new-tokens",
                "kv_cache_exceeded",
            )
        self._waiting[request.id] = request

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to run: all decodes, then prompt chunks, oldest first."""
        new = self._admit()
        work = [self._advance(seq, 1, sample=True) for seq in self._running.values() if seq.decodes]
        for seq, num_tokens in self._chunks():
            work.append(self._advance(seq, num_tokens, sample=num_tokens == seq.prompt_left))
        ended, self._ended = tuple(self._ended), []
        if not work and not ended:
            return None
        self._next_step_id += 1
        return Step(self._next_step_id, new, tuple(work), ended, self._most_tokens(work))

    def _chunks(self) -> list[tuple[_Sequence, int]]:
        """Prompt tokens of the next step, oldest first.

        Ranks that have prompts to themselves get even shares of the budget, and so do all spread prompts together:
        none waits while another computes. What a share leaves over goes to the oldest.
        """
        waiting = [seq for seq in self._running.values() if seq.prompt_left]
        sharers = {seq.home for seq in waiting}
        left = dict.fromkeys(sharers, self.config.chunk_tokens // max(len(sharers), 1))
        chunks: dict[int, int] = {}
        for seq in waiting:
            chunks[seq.request.id] = min(seq.prompt_left, left[seq.home])
            left[seq.home] -= chunks[seq.request.id]
        over = self.config.chunk_tokens - sum(chunks.values())
        for seq in waiting:
            more = min(seq.prompt_left - chunks[seq.request.id], over)
            chunks[seq.request.id] += more
            over -= more
        return [(seq, chunks[seq.request.id]) for seq in waiting if chunks[seq.request.id]]

    def complete(self, result: StepResult) -> list[TokenEvent]:
        """Take a step's tokens; those of requests that have ended meanwhile are dropped."""
        return [self._append(sampled) for sampled in result.sampled if sampled.sequence_id in self._running]

    def end(self, request_id: int) -> tuple[int, ...] | None:
        """Drop a request, waiting or running, and free its blocks.

        Returns the tokens it held on each KVP rank; None if it is not here (any more).
        """
        seq = self._running.pop(request_id, None)
        if seq is None:
            return None if self._waiting.pop(request_id, None) is None else (0,) * self.config.kvp
        for allocator, block_ids, reserved in zip(self._allocators, seq.block_ids, seq.reserved, strict=True):
            allocator.release(block_ids, reserved)
        self._ended.append(request_id)
        return self._kv_tokens_per_rank(seq)

    def _kv_tokens_per_rank(self, seq: _Sequence) -> tuple[int, ...]:
        """The last token of the output has no KV yet."""
        length = min(seq.length, len(seq.request.prompt_token_ids) + max(seq.num_output - 1, 0))
        return tuple(seq.placement.local_length(rank, length) for rank in range(self.config.kvp))

    def _blocks_needed(self, request: Request, placement: Placement) -> list[int]:
        """Blocks on each KVP rank for a request at its largest (its last token is never written)."""
        lengths = (placement.local_length(rank, request.capacity_tokens - 1) for rank in range(self.config.kvp))
        return [-(-length // self.config.block_tokens) for length in lengths]

    def _place(self, request: Request, start: int) -> Placement:
        return self.config.place(len(request.prompt_token_ids), request.capacity_tokens, start)

    def _start(self, request: Request) -> int:
        """The KVP rank with most free: short requests, and the tails of long ones, spread over the ranks."""
        policy = self.config.policy(len(request.prompt_token_ids), request.capacity_tokens)
        if self.config.batch_invariant and policy != "local":
            return 0
        return max(range(self.config.kvp), key=lambda rank: (self._allocators[rank].available, -rank))

    def _admit(self) -> tuple[NewSequence, ...]:
        new = []
        while self._waiting and len(self._running) < self.config.max_running:
            request = next(iter(self._waiting.values()))
            placement = self._place(request, self._start(request))
            needed = self._blocks_needed(request, placement)
            if any(count > allocator.available for count, allocator in zip(needed, self._allocators, strict=True)):
                break
            for count, allocator in zip(needed, self._allocators, strict=True):
                allocator.reserve(count)
            del self._waiting[request.id]
            self._running[request.id] = _Sequence(request, placement, needed, [array("q") for _ in needed])
            new.append(
                NewSequence(
                    request.id,
                    request.sampling,
                    request.seed,
                    request.capacity_tokens,
                    tuple(needed),
                    placement.spread,
                )
            )
        return tuple(new)

    def _advance(self, seq: _Sequence, num_tokens: int, sample: bool) -> SequenceWork:
        new_blocks = []
        token_ids = seq.request.prompt_token_ids[seq.length : seq.length + num_tokens].tobytes()
        seq.length += num_tokens
        seq.num_sampled += sample
        while seq.num_blocks * self.config.block_tokens < seq.length:
            owner = seq.last_owner = seq.placement.next_owner(seq.last_owner, seq.num_blocks)
            block_id = self._allocators[owner].take_reserved()
            seq.reserved[owner] -= 1
            seq.num_blocks += 1
            seq.block_ids[owner].append(block_id)
            new_blocks.append(Block(owner, block_id))
        return SequenceWork(seq.request.id, num_tokens, tuple(new_blocks), sample, token_ids)

    def _most_tokens(self, work: list[SequenceWork]) -> int:
        held = [len(ids) for piece in work for ids in self._running[piece.id].block_ids]
        return max(held, default=0) * self.config.block_tokens

    def _append(self, sampled: SampledToken) -> TokenEvent:
        seq = self._running[sampled.sequence_id]
        request = seq.request
        seq.num_output += 1
        if sampled.error:
            return TokenEvent(request.id, sampled, "error", self.end(request.id) or ())
        if sampled.token_id in request.stop_token_ids:
            return TokenEvent(request.id, None, "stop", self.end(request.id) or ())
        if seq.num_output == request.sampling.max_new_tokens:
            return TokenEvent(request.id, sampled, "length", self.end(request.id) or ())
        return TokenEvent(request.id, sampled)
