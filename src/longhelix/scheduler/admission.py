"""Admission: starts waiting requests in order, with their prefixes and placements, if there is room for them."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from operator import attrgetter

from longhelix.errors import UserError
from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.compiled_guides import CompiledGuides
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.growth import later_ranks
from longhelix.scheduler.growth_limits import GrowthLimits
from longhelix.scheduler.kv.blocks import Block, Slot
from longhelix.scheduler.kv.placement import Behind, Continued, Local, Placement, blocks_needed
from longhelix.scheduler.order import Order
from longhelix.scheduler.pending_changes import StartedSequence
from longhelix.scheduler.pinned_prefix import PinnedPrefix
from longhelix.scheduler.prefix import NO_PREFIX, Prefix, PrefixCache, Prefixes
from longhelix.scheduler.queue import WaitingQueue
from longhelix.scheduler.request import Request
from longhelix.scheduler.sequence import Job, Sequence, SequenceKV
from longhelix.scheduler.step import NO_TOKENS, InitialKV, KnownTokens, NewSequence

# After this many preemptions, a request is admitted only with reservations for all blocks that it may ever need.
MOST_PREEMPTIONS = 2
_MOST_OVERTAKEN = 32
_LOOK_AHEAD = 8  # requests that are tried after one that does not fit
# The most blocks of waiting prompts that are hashed in one step (about 3 ms), and the fewest of each prompt.
_HASHED_A_STEP, _HASHED_OF_EACH = 4096, 64
# Blocks that the first tries of long prompts may visit in one step (about 2 ms). A single prompt may have more.
_LOOKED_AT_A_STEP = 4096


class Admission:
    """The queue of waiting requests, which are admitted in their order.

    If the policy allows it, requests that fit may overtake one that does not, a limited number of times.
    """

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
        self._hashes_left = _HASHED_A_STEP  # for the next step
        self._num_looked_at = 0  # blocks of long prompts that this step has tried for the first time
        self._waiting = WaitingQueue(order.waiting, lambda: order.shares.compete)

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise UserError if a request could never run."""
        prompt, new = len(request.prompt_token_ids), request.sampling.max_new_tokens
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
        placement = self.place(request)
        needed = blocks_needed(placement, request.num_rows)
        if max(needed) > self._config.num_blocks:
            block_tokens = self._config.block_tokens
            raise UserError(
                f"{prompt} prompt tokens plus {new} new tokens need {max(needed) * block_tokens} tokens of KV cache on "
                f"one rank, but a rank's pool holds {self._config.num_blocks * block_tokens}: set --kv-cache-tokens to "
                f"at least {max(needed) * block_tokens * self._config.kvp}, or lower --max-new-tokens",
                "kv_cache_exceeded",
            )
        for window in self._pool.windows:
            most = max(min(count, window.most_at_once(placement)) for count in needed)
            if most > window.num_blocks:
                raise UserError(
                    f"a request needs {most} KV blocks of a window on one rank, but a rank has {window.num_blocks}: "
                    "raise --kv-cache-tokens",
                    "kv_cache_exceeded",
                )

    def push(self, job: Job, now_s: float, hashes: Items[bytes] = ()) -> None:
        """Queue a request. hashes: the content hashes of its first blocks, if they are known."""
        self._order.waiting(job, now_s)  # a policy may refuse it
        if hashes and self._cache is not None:
            self._cache.know(job.request, hashes)
        self._order.shares.add(job.request.service.client)
        self._waiting.push(job, now_s)

    def cancel(self, request_id: int) -> Job | None:
        """Remove a request from the queue and return it. None if it is not in the queue."""
        job = self._waiting.pop(request_id)
        if job is not None:
            self._order.shares.remove(job.request.service.client)
            if self._cache is not None:
                self._cache.forget(request_id)
        return job

    def admit(self, now_s: float, num_running: int) -> list[StartedSequence]:
        """Start the requests that fit now, while `num_running` others run."""
        started: list[StartedSequence] = []
        skipped: list[Job] = []
        room = self._config.steps.max_running - num_running
        if not room or not self._waiting:
            return started
        self._hashes_left, self._num_looked_at = _HASHED_A_STEP, 0
        for job in self._waiting.in_order(now_s):
            alone = num_running + len(started) == 0
            may_try = alone or (self._is_hashed(job) and self._is_in_turn(job))
            sequence = self._try(job, alone=alone) if may_try else None
            if sequence is not None:
                started.append(sequence)
                for other in skipped:
                    other.overtaken += 1
            elif not self._order.policy.overtakes or job.overtaken >= _MOST_OVERTAKEN or len(skipped) == _LOOK_AHEAD:
                break
            else:
                skipped.append(job)
            if len(started) == room:
                break
        return started

    def hashes(self, request: Request) -> list[bytes]:
        """See `PrefixCache.hashes`."""
        assert self._cache is not None
        return self._cache.hashes(request)

    def pin_prefix(self, request: Request, hashes: Items[bytes]) -> PinnedPrefix | None:
        """Pin the KV blocks that a prompt fills: cached ones, and new ones where the prompt would have them.

        Args:
            request: Has the prompt. It need not be queued.
            hashes: Content hashes of the blocks.

        Returns:
            The pinned prefix. None if too few blocks are free.
        """
        assert self._cache is not None
        self._cache.learn(request, hashes)
        return PinnedPrefix.take(self._pool, hashes, self._placement(request))

    def _is_hashed(self, job: Job) -> bool:
        """Continue to hash a prompt, and return whether its cached part has been hashed.

        Long prompts take several steps, so that other requests do not wait for them.
        """
        if self._cache is None:
            return True
        count, is_all = self._cache.hash_ahead(job.request, max(self._hashes_left, _HASHED_OF_EACH))
        self._hashes_left = max(self._hashes_left - count, 0)
        return is_all

    def _is_in_turn(self, job: Job) -> bool:
        """Whether a request may be tried in this step.

        The first try looks at all cached blocks of the prompt, so long prompts take turns.
        """
        if self._cache is None or job.was_tried:
            return True
        num_blocks = self._cache.num_hashed(job.request)
        if num_blocks <= _HASHED_OF_EACH:
            return True
        if self._num_looked_at and self._num_looked_at + num_blocks > _LOOKED_AT_A_STEP:
            return False
        self._num_looked_at += num_blocks
        return True

    def _try(self, job: Job, *, alone: bool) -> StartedSequence | None:
        """Begin a request if it fits, see `_begin`, which looks at every block of a prefix.

        A request that has not fitted before, or whose prompt begins like that of one that has not, is looked up first.
        That happens in every step, because almost anything may give it room.
        """
        is_known = job.was_tried or (self._cache is not None and self._cache.is_alike(job.request))
        job.was_tried = True
        if is_known and self._cache is not None and not self._may_fit(job, alone=alone):
            return None
        return self._begin(job, alone=alone)

    def _may_fit(self, job: Job, *, alone: bool) -> bool:
        """Return whether there may be room for a request, from the numbers of blocks of its prefix alone.

        False only if `_begin` would find no room.
        """
        request, block_tokens = job.request, self._config.block_tokens
        if not self._config.steps.own_clocks and not self._guides.may_begin(request, 0):
            return False
        assert self._cache is not None
        most_tokens = self._most_cached_tokens(job)
        match = self._cache.match(request, -(-most_tokens // block_tokens))
        # The request needs at least these blocks, whichever ranks have them. Mostly this check suffices.
        if -(-len(request.prompt_token_ids) // block_tokens) - match.num_held > self._pool.available:
            return False
        if self._pool.windows:  # it may begin with a shorter prefix than the match
            anywhere = self.place(request)
            needed = blocks_needed(anywhere, len(request.prompt_token_ids))
            return all(window.may_fit(needed, anywhere) for window in self._pool.windows)
        if not match.num_blocks:
            return self._fits_by_number(job, self._placement(request), Counter(), Counter(), alone=alone)
        owners, kept, unheld = match.counts()
        behind, fresh = self._behind(request, owners, match.last.owner), self._placement(request)
        is_used = max(blocks_needed(behind, request.num_rows)) <= self._config.most_blocks
        may_be_unused = False  # whether the prefix is used depends on the rank of each block
        if self._config.placement.batch_invariant and isinstance(fresh, Local):
            is_used = is_used and len(owners) == 1
        elif self._config.placement.batch_invariant:
            may_be_unused = True
        if (not is_used or may_be_unused) and self._fits_by_number(job, fresh, Counter(), Counter(), alone=alone):
            return True
        if not is_used:
            return False
        if match.num_blocks * block_tokens <= most_tokens:
            return self._fits_by_number(job, behind, kept, unheld, alone=alone)
        last = Counter({match.last.owner: 1})
        shared = kept - last if isinstance(match.last, Block) else kept
        if self._fits_by_number(job, behind, shared, unheld, alone=alone):
            return True
        # Try it without the block that the prefix does not fill.
        before = match.owner_before_last
        placement = self._placement(request) if before is None else self._behind(request, owners - last, before)
        unheld -= self._pool.unheld([match.last] if isinstance(match.last, Block) else [])
        return self._fits_by_number(job, placement, shared, unheld, alone=alone)

    def _behind(self, request: Request, owners: Counter[int], last: int) -> Behind:
        """Return the placement behind a prefix, from the number of its blocks on each rank."""
        return Behind(self._placement(request, last, owners), owners, last)

    def _fits_by_number(
        self, job: Job, placement: Placement | Behind, shared: Counter[int], unheld: Counter[int], *, alone: bool
    ) -> bool:
        """Return whether a request fits, from numbers of blocks alone.

        shared: full blocks of each rank that it shares. unheld: those of them without a holder.
        """
        room, reservations = self._room(job, placement, shared)
        return self._pool.fits(room, reservations, unheld, alone=alone)

    def _begin(self, job: Job, *, alone: bool) -> StartedSequence | None:
        """Start a request. None if there is no room for it now, or no time for its guide.

        It needs room for its whole prompt, because a prompt that lost its blocks half way would have to begin again.
        """
        history = job.history
        request = job.request
        for placement, prefix in self._beginnings(job, alone=alone):
            room, reservations = self._room(job, placement, self._shared(prefix))
            unheld = self._pool.unheld(prefix.kept)
            if self._pool.fits(room, reservations, unheld, alone=alone) and self._pool.fits_windows(
                reservations, prefix, placement, alone=alone
            ):
                break
        else:
            return None
        clock = placement.start if self._config.steps.own_clocks else 0  # of the ranks that sample its tokens
        if not self._guides.may_begin(request, clock):
            return None
        self._guides.begin(request, clock)
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        self._waiting.pop(request.id)
        kv = SequenceKV(placement=placement, room=room, reserved=reservations, block_ids=[array("q") for _ in room])
        seq = Sequence(job, kv)
        if history.preemptions:
            history.recomputed_tokens += max(history.lost_tokens - prefix.num_tokens, 0)
        else:
            history.cached_tokens = prefix.num_tokens
        history.swapped_tokens += prefix.swapped_tokens(self._config.block_tokens)
        if self._cache is not None:
            self._cache.begin(seq, len(full_blocks))
        blocks, copies = self._take_over(prefix, seq)
        new = NewSequence(
            id=request.id,
            sampling=request.sampling,
            seed=request.seed,
            capacity_tokens=request.capacity_tokens,
            kv=InitialKV(
                blocks_per_rank=tuple(room),
                spread=placement.spread,
                cached_tokens=prefix.num_tokens,
                cached_blocks=blocks,
            ),
            known=_known_tokens(request, prefix),
            images=request.images,
        )
        return StartedSequence(seq, new, copies)

    def _beginnings(self, job: Job, *, alone: bool) -> Iterator[tuple[Placement, Prefix]]:
        """Yield the placements and prefixes that a request may begin with, the best first."""
        request, (placement, prefix) = job.request, self._placed(job)
        yield placement, prefix
        # A copied block takes the room of two blocks, which a request that fills the pool does not have.
        whole = self._whole(prefix, request)
        if whole.num_tokens != prefix.num_tokens:
            yield self._placement_behind(whole, request), whole
        # The cached blocks of a window and the reservations together may exceed the pool. With nothing else running, no
        # blocks will become free, so the request begins without the prefix.
        if self._pool.windows and whole.num_tokens and alone:
            yield self._placement(request), NO_PREFIX

    def _shared(self, prefix: Prefix) -> Counter[int]:
        """Return how many full blocks of a prefix each rank has in its pool."""
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        return Counter([block.owner for block in full_blocks if isinstance(block, Block)])

    def _room(self, job: Job, placement: Placement | Behind, shared: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Return the most blocks that a request may have on each rank, and the blocks to reserve when it begins.

        shared: blocks of each rank that it shares, which need no reservation.
        """
        whole = blocks_needed(placement, job.request.num_rows)
        reserves_all = job.history.preemptions >= MOST_PREEMPTIONS
        needed = whole if reserves_all else blocks_needed(placement, len(job.request.prompt_token_ids))
        later = () if self._config.placement.batch_invariant else later_ranks(placement)
        most = max((whole[rank] for rank in later), default=0)
        room = [most if rank in later else count for rank, count in enumerate(whole)]
        return room, [count - shared[rank] for rank, count in enumerate(needed)]

    def _whole(self, prefix: Prefix, request: Request) -> Prefix:
        """Return the prefix without the block that it does not fill, if there is one."""
        num_tokens = prefix.num_tokens // self._config.block_tokens * self._config.block_tokens
        return prefix if num_tokens == prefix.num_tokens else self._cut(prefix, request, num_tokens)

    def _cut(self, prefix: Prefix, request: Request, most_tokens: int) -> Prefix:
        """Return the longest part of a request's prefix, up to `most_tokens`, that is cached in all groups."""
        prefix = prefix.cut(most_tokens, self._config.block_tokens)
        return prefix if self._cache is None else self._cache.within_windows(request, prefix)

    def _placement_behind(self, prefix: Prefix, request: Request) -> Placement:
        """Return the request's placement, continued behind the blocks of a prefix."""
        owners = tuple(map(attrgetter("owner"), prefix.blocks))
        if not owners:
            return self._placement(request)
        return Continued(self._placement(request, owners[-1], set(owners)), owners)

    def _placed(self, job: Job) -> tuple[Placement, Prefix]:
        """Return a request's placement, and the prefix that it begins with.

        The request begins without a prefix if the prefix would make a rank hold more blocks than a rank may need, or
        would make results depend on which request computed it. Tokens that are yet to be scored are not in a prefix.
        """
        request = job.request
        placement = self._placement(request)
        if self._prefixes is None:
            return placement, NO_PREFIX
        prefix = self._cut(self._prefixes.find(request), request, self._most_cached_tokens(job))
        if not prefix.blocks:
            return placement, NO_PREFIX
        continued = self._placement_behind(prefix, request)
        assert isinstance(continued, Continued)
        if max(blocks_needed(continued, request.num_rows)) > self._config.most_blocks:
            return placement, NO_PREFIX
        # Merges add up in the order of the ranks, so only local placements give the same bits on any rank.
        alone = self.place(request, continued.start) if isinstance(placement, Local) else placement
        if self._config.placement.batch_invariant and not continued.follows(alone):
            return placement, NO_PREFIX
        return continued, prefix

    def _most_cached_tokens(self, job: Job) -> int:
        """Return the length of the longest prefix that a request may begin with."""
        request = job.request
        if request.sampling.prompt_logprobs is not None and job.history.scored_tokens < request.given_tokens - 1:
            return job.history.scored_tokens
        # One token is left, because its logits are wanted.
        return len(request.prompt_token_ids) - 1

    def _take_over(self, prefix: Prefix, seq: Sequence) -> tuple[tuple[Block, ...], tuple[tuple[Block, Block], ...]]:
        """Give a sequence the KV blocks of its prefix, and return its blocks and the copies.

        Full blocks are shared, a block that is not full is copied, and swapped blocks are swapped in.
        """
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        rest = prefix.blocks[len(full_blocks) :]
        copied = prefix.copied if any(isinstance(block, Block) for block in rest) else ()
        swapped = [block for block in rest if isinstance(block, Slot)]
        if copied:
            self._pool.borrow(copied)
        new = list(seq.kv.reserved)
        blocks = self._pool.begin(seq, full_blocks)
        self._pool.begin_windows(seq, new, prefix)
        seq.length = prefix.num_tokens
        added = self._pool.take_needed(seq)
        self._pool.swaps.swap_in(swapped, added[: len(swapped)])
        return self._pool.as_sent(seq, blocks + added), tuple(zip(copied, self._pool.as_sent(seq, added), strict=False))

    def place(self, request: Request, start: int = 0, later: tuple[int, ...] = ()) -> Placement:
        """Return a request's placement that begins on KVP rank `start`. later: see `Growing`."""
        limit_tokens = self._limits.of(request)
        return self._config.place(request.given_tokens, request.capacity_tokens, start, later, limit_tokens)

    def _placement(self, request: Request, last: int | None = None, owners: Collection[int] = ()) -> Placement:
        """Return a request's placement behind blocks on the ranks `owners`; `last` is the rank of the last block.

        It begins on the rank with the most free blocks, which spreads short requests and the ends of long ones.
        """
        limit_tokens = request.service.growth_limit_tokens
        name = self._config.placement_of(request.given_tokens, request.capacity_tokens, limit_tokens)
        if self._config.placement.batch_invariant and name != "local":
            return self.place(request)
        start, *later = self._pool.in_order(last, owners)
        return self.place(request, start, tuple(later))


def _known_tokens(request: Request, prefix: Prefix) -> KnownTokens:
    """Return the tokens that ranks need of a request that begins with a prefix."""
    seen_ids, generated_ids = prefix.seen_token_ids(request), request.generated_token_ids
    return KnownTokens(seen_ids, generated_ids) if seen_ids or generated_ids else NO_TOKENS
