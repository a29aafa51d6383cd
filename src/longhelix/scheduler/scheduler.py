"""The scheduler: requests in, Steps out. Continuous batching.

It is the only decision maker: admission, blocks, chunks, parts, ends. It never needs a sampled token's value to plan
the next step, because workers keep their own copy of every sequence; so several steps may be in flight.
"""

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from longhelix.errors import UserError
from longhelix.kv.blocks import IDS_PER_BLOCK, Block, BlockAllocator
from longhelix.kv.placement import Continued, Local, Placement
from longhelix.request import Chunk, NewSequence, Request, SampledToken, Step, StepResult, Work
from longhelix.scheduler.chunk_rule import ChunkRule, FixedChunks
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.policy import FirstComeFirstServed, Policy
from longhelix.scheduler.prefix import NO_PREFIX, Prefix, Prefixes
from longhelix.scheduler.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenEvent:
    """A request's new token (None where a stop token ended it), and why the request ended, if it did.

    `sampled.error` says what went wrong, where that ended the request. After its end the scheduler has forgotten the
    request; `kv_tokens_per_rank` says what it held.
    """

    request_id: int
    sampled: SampledToken | None
    finish_reason: FinishReason | None = None
    kv_tokens_per_rank: tuple[int, ...] = ()


class Scheduler:
    """State + budget + now -> Step. `schedule` and `complete` are called in the order of steps.

    policy: which request goes next. chunk_rule: how many prompt tokens a step computes (default:
    `config.chunk_tokens`). cut: in how many parts a step attends; None where exchanges do not travel while ranks
    compute. prefixes: KV that requests need not compute (default: none).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy | None = None,
        chunk_rule: ChunkRule | None = None,
        cut: Cut | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.config = config
        self._policy = FirstComeFirstServed() if policy is None else policy
        self._chunk_rule = FixedChunks(config.chunk_tokens) if chunk_rule is None else chunk_rule
        self._cut = cut
        self._prefixes = prefixes
        self._allocators = [BlockAllocator(config.num_blocks) for _ in range(config.kvp)]
        self._listed = [0] * config.kvp  # block ids that the running sequences may come to have, shared ones each time
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # cancelled anywhere at the cost of one
        self._running: dict[int, Sequence] = {}
        self._prompts: dict[int, Sequence] = {}  # those with prompt tokens left
        self._decodes = Decodes(config.block_tokens)
        # What the next step says.
        self._joining: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._ended: list[int] = []
        self._copies: list[tuple[Block, Block]] = []
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it could never run."""
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

    def schedule(self, now_s: float) -> Step | None:
        """The next step: one row of every decode, and chunks of prompts. None if there is nothing to run."""
        new = self._admit(now_s)
        joining = self._join()
        done, growing = self._decodes.advance()
        self._leaving += done
        grown = tuple([(seq.id, self._take_block(seq)) for seq in growing])
        self._decodes.look_again(growing)
        decodes = len(self._decodes)
        work = Work(decodes, self._decodes.kv_tokens, sampled_rows=decodes)
        most_blocks = self._decodes.most_blocks
        chunks, work = self._chunks(work, now_s)
        if not (decodes or chunks or self._ended):
            return None
        if self._cut is not None:
            work = work._replace(parts=self._cut.parts(work))
        if chunks:
            most_blocks = max(most_blocks, *(self._running[chunk.id].most_blocks for chunk in chunks))
        ended, leaving = tuple(self._ended), tuple(seq.id for seq in self._leaving if seq.id in self._running)
        copies = tuple(self._copies)
        self._ended, self._leaving, self._copies = [], [], []
        self._next_step_id += 1
        most_tokens = most_blocks * self.config.block_tokens
        return Step(self._next_step_id, new, joining, leaving, grown, chunks, ended, most_tokens, work, copies)

    def _join(self) -> tuple[int, ...]:
        """Sequences whose prompts were finished by the last step; they decode from this step on."""
        joining = [seq for seq in self._joining if seq.id in self._running]
        self._joining = []
        for seq in joining:
            self._decodes.join(seq)
        return tuple(seq.id for seq in joining)

    def _chunks(self, beside: Work, now_s: float) -> tuple[tuple[Chunk, ...], Work]:
        """The next chunks of prompts, and the work of them and of `beside` together."""
        if not self._prompts:
            return (), beside
        prompts = self._policy.order(self._prompts.values(), now_s)
        sizes = self._chunk_rule.sizes(prompts, beside)
        chunks = []
        for seq, num_tokens in zip(prompts, sizes, strict=True):
            if num_tokens:
                work = Work.chunk(num_tokens, seq.length)
                chunks.append(self._chunk(seq, num_tokens))
                beside += work._replace(sampled_rows=int(chunks[-1].sample))
        return tuple(chunks), beside

    def _chunk(self, seq: Sequence, num_tokens: int) -> Chunk:
        token_ids = seq.request.prompt_token_ids[seq.length : seq.length + num_tokens].tobytes()
        seq.length += num_tokens
        ends = not seq.prompt_left
        if ends:
            del self._prompts[seq.id]
            if seq.length < seq.num_rows:
                self._joining.append(seq)
        return Chunk(seq.id, token_ids, self._take_blocks(seq), sample=ends)

    def complete(self, result: StepResult) -> list[TokenEvent]:
        """Take a step's tokens. Tokens of requests that have ended meanwhile are dropped."""
        return [self._append(sampled) for sampled in result.sampled if sampled.sequence_id in self._running]

    def end(self, request_id: int) -> tuple[int, ...] | None:
        """Drop a request, waiting or running, and free its blocks.

        Returns the tokens it held on each KVP rank, or None if it has already ended.
        """
        seq = self._running.pop(request_id, None)
        if seq is None:
            return None if self._waiting.pop(request_id, None) is None else (0,) * self.config.kvp
        self._prompts.pop(request_id, None)
        if seq in self._decodes:
            self._decodes.leave(seq)
        for rank, (block_ids, needed) in enumerate(zip(seq.block_ids, seq.needed, strict=True)):
            self._listed[rank] -= needed
            self._allocators[rank].release(block_ids, needed - len(block_ids))
        self._ended.append(request_id)
        return self._kv_tokens_per_rank(seq)

    def blocks_of(self, request_id: int, num_blocks: int) -> tuple[Block, ...]:
        """The first KV blocks of a running request, in position order."""
        seq = self._running[request_id]
        ids = [iter(of_rank) for of_rank in seq.block_ids]
        owners = (seq.placement.owner(index * self.config.block_tokens) for index in range(num_blocks))
        return tuple(Block(owner, next(ids[owner])) for owner in owners)

    def hold(self, request: Request, num_blocks: int) -> tuple[Block, ...] | None:
        """Take the first KV blocks of a request that is not known here, where it would have them. None if they are not
        free now."""
        placement = self._place(request, self._start(request))
        owners = [placement.owner(index * self.config.block_tokens) for index in range(num_blocks)]
        counts = Counter(owners)
        if any(counts[rank] > allocator.available for rank, allocator in enumerate(self._allocators)):
            return None
        for rank, count in counts.items():
            self._allocators[rank].reserve(count)
        return tuple(Block(owner, self._allocators[owner].take_reserved()) for owner in owners)

    def release(self, blocks: tuple[Block, ...]) -> None:
        """Give back what `hold` gave."""
        for rank, allocator in enumerate(self._allocators):
            allocator.release(array("q", [block.id for block in blocks if block.owner == rank]), 0)

    def _kv_tokens_per_rank(self, seq: Sequence) -> tuple[int, ...]:
        """Tokens with KV on each KVP rank; the last token of the output has none yet."""
        length = min(seq.length, len(seq.request.prompt_token_ids) + max(seq.num_output - 1, 0))
        return tuple(seq.placement.local_length(rank, length) for rank in range(self.config.kvp))

    def _blocks_needed(self, request: Request, placement: Placement) -> list[int]:
        """Blocks on each KVP rank for a request at its full length. Its last token is never written."""
        lengths = (placement.local_length(rank, request.capacity_tokens - 1) for rank in range(self.config.kvp))
        return [-(-length // self.config.block_tokens) for length in lengths]

    def _place(self, request: Request, start: int) -> Placement:
        return self.config.place(len(request.prompt_token_ids), request.capacity_tokens, start)

    def _start(self, request: Request) -> int:
        """The KVP rank with the most free blocks, so that short requests and the ends of long ones spread over the
        ranks."""
        name = self.config.placement_of(len(request.prompt_token_ids), request.capacity_tokens)
        if self.config.batch_invariant and name != "local":
            return 0
        return max(range(self.config.kvp), key=lambda rank: (self._allocators[rank].available, -rank))

    def _admit(self, now_s: float) -> tuple[NewSequence, ...]:
        new = []
        while self._waiting and len(self._running) < self.config.max_running:
            request = self._policy.first(self._waiting, now_s)
            placement, prefix = self._begin(request)
            needed, full_blocks = self._blocks_needed(request, placement), prefix.full_blocks(self.config.block_tokens)
            shared = Counter(block.owner for block in full_blocks)
            reserved = [count - shared[rank] for rank, count in enumerate(needed)]
            if any(count > allocator.available for count, allocator in zip(reserved, self._allocators, strict=True)):
                break
            listed = [count + more for count, more in zip(self._listed, needed, strict=True)]
            if max(listed) > IDS_PER_BLOCK * self.config.num_blocks:
                break
            self._listed = listed
            for count, allocator in zip(reserved, self._allocators, strict=True):
                allocator.reserve(count)
            del self._waiting[request.id]
            seq = Sequence(request, placement, needed, [array("q") for _ in needed])
            self._running[request.id] = self._prompts[request.id] = seq
            new.append(
                NewSequence(
                    request.id,
                    request.sampling,
                    request.seed,
                    request.capacity_tokens,
                    tuple(needed),
                    placement.spread,
                    prefix.num_tokens,
                    self._take_over(prefix, seq) if prefix.blocks else (),
                    prefix.seen_token_ids(request),
                )
            )
        return tuple(new)

    def _begin(self, request: Request) -> tuple[Placement, Prefix]:
        """A request's placement, and the prefix that it begins with.

        There is no prefix where it would make a rank hold more than any rank may need to, or make the request's bits
        depend on who has computed it.
        """
        placement = self._place(request, self._start(request))
        if self._prefixes is None:
            return placement, NO_PREFIX
        block_tokens = self.config.block_tokens
        # One token is left, because its logits are wanted.
        prefix = self._prefixes.find(request).cut(len(request.prompt_token_ids) - 1, block_tokens)
        if not prefix.blocks:
            return placement, NO_PREFIX
        continued = Continued(placement, tuple(block.owner for block in prefix.blocks))
        most_blocks = min(self.config.num_blocks, -(-self.config.longest_local_tokens // block_tokens))
        if max(self._blocks_needed(request, continued)) > most_blocks:
            return placement, NO_PREFIX
        # Merges add up in the order of the ranks, and only what is local may be anywhere.
        alone = self._place(request, continued.start) if isinstance(placement, Local) else placement
        if self.config.batch_invariant and not continued.follows(alone):
            return placement, NO_PREFIX
        return continued, prefix

    def _take_over(self, prefix: Prefix, seq: Sequence) -> tuple[Block, ...]:
        """Begin a sequence with the KV blocks of its prefix: full blocks are shared, a block that is not full is
        copied."""
        full_blocks = prefix.full_blocks(self.config.block_tokens)
        for block in full_blocks:
            seq.block_ids[block.owner].append(block.id)
        for allocator, block_ids in zip(self._allocators, seq.block_ids, strict=True):
            allocator.share(block_ids)
        seq.length, seq.num_blocks, seq.most_blocks = prefix.num_tokens, len(full_blocks), max(map(len, seq.block_ids))
        seq.last_owner = full_blocks[-1].owner if full_blocks else 0
        copied = self._take_blocks(seq)
        self._copies += zip(prefix.blocks[len(full_blocks) :], copied, strict=True)
        return full_blocks + copied

    def _take_blocks(self, seq: Sequence) -> tuple[Block, ...]:
        """Take the KV blocks that the grown sequence needs and does not have yet."""
        needed = -(-seq.length // self.config.block_tokens)
        return tuple(self._take_block(seq) for _ in range(seq.num_blocks, needed))

    def _take_block(self, seq: Sequence) -> Block:
        """Take the sequence's next KV block."""
        owner = seq.last_owner = seq.placement.next_owner(seq.last_owner, seq.num_blocks)
        block_id = self._allocators[owner].take_reserved()
        block_ids = seq.block_ids[owner]
        block_ids.append(block_id)
        seq.num_blocks += 1
        if len(block_ids) > seq.most_blocks:
            seq.most_blocks = len(block_ids)
        return Block(owner, block_id)

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
