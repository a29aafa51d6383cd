"""How requests begin to run: in which order, where their KV goes, what of it is there, whether there is room."""

from array import array
from collections import Counter

from longhelix.errors import UserError
from longhelix.kv.blocks import Block, Slot
from longhelix.kv.placement import Continued, Local, Placement, blocks_needed
from longhelix.request import Request
from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.compiled_guides import CompiledGuides
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.growth import later_ranks
from longhelix.scheduler.growth_limits import GrowthLimits
from longhelix.scheduler.held_prefix import HeldPrefix
from longhelix.scheduler.notices import Begun
from longhelix.scheduler.order import Order
from longhelix.scheduler.prefix import NO_PREFIX, Prefix, PrefixCache, Prefixes
from longhelix.scheduler.queue import WaitingQueue
from longhelix.scheduler.sequence import Job, Sequence
from longhelix.step import NewSequence

# After so many a request is admitted only with all that it may ever need, so that none is preempted again and again.
MOST_PREEMPTIONS = 2
_MOST_OVERTAKEN = 32
_LOOK_AHEAD = 8  # requests that are tried while some before them do not fit


class Admission:
    """The requests that wait. They begin in their order, and where the policy lets them, those that fit before one that
    does not, for a while."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        order: Order,
        limits: GrowthLimits,
        prefixes: Prefixes | None,
        cache: PrefixCache | None,
        guides: CompiledGuides,
    ) -> None:
        self._config = config
        self._pool = pool
        self._order = order
        self._limits = limits
        self._prefixes = prefixes
        self._cache = cache
        self._guides = guides
        self._chances = 0
        self._waiting = WaitingQueue(order.waiting, lambda: order.shares.compete)

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise UserError if a request could never run."""
        prompt, new = len(request.prompt_token_ids), request.sampling.most_sampled
        if prompt == 0:
            raise UserError("the prompt is empty: give at least one token", "empty_prompt")
        if prompt + new > self._config.max_model_len:
            room = self._config.max_model_len - prompt
            raise UserError(
                f"{prompt} prompt tokens plus {new} new tokens exceed --max-model-len {self._config.max_model_len}: "
                + (f"set --max-new-tokens to at most {room}, or " if room > 0 else "shorten the prompt, or set ")
                + f"--max-model-len to at least {prompt + new}",
                "context_length_exceeded",
            )
        self._limits.check(request)
        needed = blocks_needed(self.place(request), request.capacity_tokens - 1)
        if max(needed) > self._config.num_blocks:
            block_tokens = self._config.block_tokens
            raise UserError(
                f"{prompt} prompt tokens plus {new} new tokens need {max(needed) * block_tokens} tokens of KV cache on "
                f"one rank, but a rank's pool holds {self._config.num_blocks * block_tokens}: set --kv-cache-tokens to "
                f"at least {max(needed) * block_tokens * self._config.kvp}, or lower --max-new-tokens",
                "kv_cache_exceeded",
            )

    def push(self, job: Job, now_s: float) -> None:
        """A request waits from now on."""
        self._order.shares.add(job.request.service.client)
        self._waiting.push(job, now_s)

    def cancel(self, request_id: int) -> Job | None:
        """A request waits no longer. None: it did not."""
        job = self._waiting.pop(request_id)
        if job is not None:
            self._order.shares.remove(job.request.service.client)
            if self._cache is not None:
                self._cache.forget(request_id)
        return job

    def admit(self, now_s: float, num_running: int) -> list[Begun]:
        """The requests that begin now, beside those that run."""
        begun: list[Begun] = []
        passed: list[Job] = []
        room = self._config.max_running - num_running
        if not room or not self._waiting:
            return begun
        chances = self._chances + self._pool.releases
        for job in self._waiting.in_order(now_s):
            alone = num_running + len(begun) == 0
            one = self._begin(job, alone=alone) if alone or job.tried_at != chances else None
            job.tried_at = chances
            if one is not None:
                begun.append(one)
                for other in passed:
                    other.overtaken += 1
            elif not self._order.policy.overtakes or job.overtaken >= _MOST_OVERTAKEN or len(passed) == _LOOK_AHEAD:
                break
            else:
                passed.append(job)
            if len(begun) == room:
                break
        return begun

    def try_again(self) -> None:
        """Blocks of a prompt can be found, which a request that did not fit may now share; or the step has begun that
        one with a guide was not to be in."""
        self._chances += 1

    def hold(self, request: Request) -> HeldPrefix | None:
        """Hold the KV blocks that a prompt fills, which need not be that of a request here: those that are cached, and
        where the prompt would have them new ones. None if these are not free now."""
        assert self._cache is not None
        return HeldPrefix.take(self._pool, self._cache.hashes(request), self._placement(request))

    def _begin(self, job: Job, *, alone: bool) -> Begun | None:
        """A request that begins to run. None: there is no room for it now, or no time for its guide.

        There is room for its whole prompt, because a prompt that lost its blocks half way would have to begin again.
        """
        request = job.request
        placement, prefix = self._placed(job)
        room, promised = self._room(job, placement, prefix)
        if not self._pool.fits(room, promised, prefix.kept, alone=alone):
            # A block that is copied takes the room of two, which a request that fills the pool does not have.
            prefix = self._whole(prefix)
            placement = self._placement_behind(prefix, request)
            room, promised = self._room(job, placement, prefix)
            if not self._pool.fits(room, promised, prefix.kept, alone=alone):
                return None
        clock = placement.start if self._config.own_clocks else 0  # of the ranks that sample its tokens
        if not self._guides.may_begin(request, clock):
            return None
        self._guides.begin(request, clock)
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        self._waiting.pop(request.id)
        seq = Sequence(job, placement, room, promised, [array("q") for _ in room])
        if job.preemptions:
            job.recomputed_tokens += max(job.lost_tokens - prefix.num_tokens, 0)
        else:
            job.cached_tokens = prefix.num_tokens
        job.swapped_tokens += prefix.swapped_tokens(self._config.block_tokens)
        if self._cache is not None:
            self._cache.begin(seq, len(full_blocks))
        blocks, copies = self._take_over(prefix, seq)
        new = NewSequence(
            request.id,
            request.sampling,
            request.seed,
            request.capacity_tokens,
            tuple(room),
            placement.spread,
            prefix.num_tokens,
            blocks,
            prefix.seen_token_ids(request),
            request.generated_token_ids,
            images=request.images,
        )
        return Begun(seq, new, copies)

    def _room(self, job: Job, placement: Placement, prefix: Prefix) -> tuple[list[int], list[int]]:
        """The blocks that a request may come to have of each rank, and those that it is promised when it begins."""
        whole = blocks_needed(placement, job.request.capacity_tokens - 1)
        bound = job.preemptions >= MOST_PREEMPTIONS
        wanted = whole if bound else blocks_needed(placement, len(job.request.prompt_token_ids))
        later = () if self._config.batch_invariant else later_ranks(placement)
        most = max((whole[rank] for rank in later), default=0)
        room = [most if rank in later else count for rank, count in enumerate(whole)]
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        shared = Counter(block.owner for block in full_blocks if isinstance(block, Block))
        return room, [count - shared[rank] for rank, count in enumerate(wanted)]

    def _whole(self, prefix: Prefix) -> Prefix:
        """The prefix without a block that it does not fill."""
        block_tokens = self._config.block_tokens
        return prefix.cut(prefix.num_tokens // block_tokens * block_tokens, block_tokens)

    def _placement_behind(self, prefix: Prefix, request: Request) -> Placement:
        """The request's own placement, which goes on after the blocks of a prefix."""
        owners = tuple(block.owner for block in prefix.blocks)
        placement = self._placement(request, owners)
        return Continued(placement, owners) if owners else placement

    def _placed(self, job: Job) -> tuple[Placement, Prefix]:
        """A request's placement, and the prefix that it begins with.

        There is no prefix where it would make a rank hold more than any rank may need to, or make the request's bits
        depend on who has computed it, nor of what rows have yet to be computed for, because they are scored.
        """
        request = job.request
        placement = self._placement(request)
        if self._prefixes is None:
            return placement, NO_PREFIX
        block_tokens = self._config.block_tokens
        # One token is left, because its logits are wanted.
        most_tokens = len(request.prompt_token_ids) - 1
        if request.sampling.prompt_logprobs is not None and job.scored_tokens < request.given_tokens - 1:
            most_tokens = job.scored_tokens
        prefix = self._prefixes.find(request).cut(most_tokens, block_tokens)
        if not prefix.blocks:
            return placement, NO_PREFIX
        continued = self._placement_behind(prefix, request)
        assert isinstance(continued, Continued)
        if max(blocks_needed(continued, request.capacity_tokens - 1)) > self._config.most_blocks:
            return placement, NO_PREFIX
        # Merges add up in the order of the ranks, and only what is local may be anywhere.
        alone = self.place(request, continued.start) if isinstance(placement, Local) else placement
        if self._config.batch_invariant and not continued.follows(alone):
            return placement, NO_PREFIX
        return continued, prefix

    def _take_over(self, prefix: Prefix, seq: Sequence) -> tuple[tuple[Block, ...], tuple[tuple[Block, Block], ...]]:
        """Begin a sequence with the KV blocks of its prefix: full blocks are shared, a block that is not full is
        copied, and what is swapped is swapped in. Returns its blocks and the copies."""
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        rest = prefix.blocks[len(full_blocks) :]
        copied = [block for block in rest if isinstance(block, Block)]
        swapped = [block for block in rest if isinstance(block, Slot)]
        for block in copied:
            self._pool.borrow(block)
        blocks = self._pool.begin(seq, full_blocks)
        seq.length = prefix.num_tokens
        own = self._pool.take_needed(seq)
        self._pool.swaps.swap_in(swapped, own[: len(swapped)])
        return blocks + own, tuple(zip(copied, own, strict=False))

    def place(self, request: Request, start: int = 0, later: tuple[int, ...] = ()) -> Placement:
        """A request's own placement from a KVP rank on. later: see `Growing`."""
        limit_tokens = self._limits.of(request)
        return self._config.place(request.given_tokens, request.capacity_tokens, start, later, limit_tokens)

    def _placement(self, request: Request, owners: tuple[int, ...] = ()) -> Placement:
        """A request's own placement, behind blocks with `owners`. It begins on the rank with the most free blocks, so
        that short requests and the ends of long ones spread over the ranks."""
        limit_tokens = request.service.growth_limit_tokens
        name = self._config.placement_of(request.given_tokens, request.capacity_tokens, limit_tokens)
        if self._config.batch_invariant and name != "local":
            return self.place(request)
        start, *later = self._pool.in_order(owners)
        return self.place(request, start, tuple(later))
