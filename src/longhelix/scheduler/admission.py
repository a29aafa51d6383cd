"""How requests begin to run: in which order, where their KV goes, what of it is there, whether there is room."""

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
from longhelix.scheduler.held_prefix import HeldPrefix
from longhelix.scheduler.kv.blocks import Block, Slot
from longhelix.scheduler.kv.placement import Behind, Continued, Local, Placement, blocks_needed
from longhelix.scheduler.order import Order
from longhelix.scheduler.pending_changes import StartedSequence
from longhelix.scheduler.prefix import NO_PREFIX, Prefix, PrefixCache, Prefixes
from longhelix.scheduler.queue import WaitingQueue
from longhelix.scheduler.request import Request
from longhelix.scheduler.sequence import Job, Sequence, SequenceKV
from longhelix.scheduler.step import NO_TOKENS, InitialKV, KnownTokens, NewSequence

# After so many a request is admitted only with all that it may ever need, so that none is preempted again and again.
MOST_PREEMPTIONS = 2
_MOST_OVERTAKEN = 32
_LOOK_AHEAD = 8  # requests that are tried while some before them do not fit
# Blocks of waiting prompts that are hashed for one step, which takes about 3 ms, and of each prompt at least.
_HASHED_A_STEP, _HASHED_OF_EACH = 4096, 64
# Blocks that the first tries of long prompts may look at in one step, which takes about 2 ms. One prompt may have more.
_LOOKED_AT_A_STEP = 4096


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
        """Queue a request. hashes: those of its first blocks, if they are known."""
        self._order.waiting(job, now_s)  # a policy may refuse it
        if hashes and self._cache is not None:
            self._cache.know(job.request, hashes)
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

    def admit(self, now_s: float, num_running: int) -> list[StartedSequence]:
        """The requests that begin now, beside those that run."""
        started: list[StartedSequence] = []
        passed: list[Job] = []
        room = self._config.max_running - num_running
        if not room or not self._waiting:
            return started
        self._hashes_left, self._num_looked_at = _HASHED_A_STEP, 0
        for job in self._waiting.in_order(now_s):
            alone = num_running + len(started) == 0
            one = self._try(job, alone=alone) if alone or (self._is_hashed(job) and self._is_in_turn(job)) else None
            if one is not None:
                started.append(one)
                for other in passed:
                    other.overtaken += 1
            elif not self._order.policy.overtakes or job.overtaken >= _MOST_OVERTAKEN or len(passed) == _LOOK_AHEAD:
                break
            else:
                passed.append(job)
            if len(started) == room:
                break
        return started

    def hashes(self, request: Request) -> list[bytes]:
        """See `PrefixCache.hashes`."""
        assert self._cache is not None
        return self._cache.hashes(request)

    def hold(self, request: Request, hashes: Items[bytes]) -> HeldPrefix | None:
        """Hold the KV blocks that a prompt fills, which need not be that of a request here: those that are cached, and
        where the prompt would have them new ones. None if these are not free now. hashes: those of its blocks."""
        assert self._cache is not None
        self._cache.learn(request, hashes)
        return HeldPrefix.take(self._pool, hashes, self._placement(request))

    def _is_hashed(self, job: Job) -> bool:
        """Whether the cached part of a prompt has been hashed. That of a long prompt takes several steps, so that the
        tokens of others do not wait for it."""
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
        """Whether there may be room for a request now, by the numbers of its prefix's blocks alone. Says no only where
        `_begin` would find none."""
        request, block_tokens = job.request, self._config.block_tokens
        if not self._config.own_clocks and not self._guides.may_begin(request, 0):
            return False
        assert self._cache is not None
        most_tokens = self._most_cached_tokens(job)
        match = self._cache.match(request, -(-most_tokens // block_tokens))
        # Whichever ranks have them, it takes at least these blocks: mostly this is answer enough.
        if -(-len(request.prompt_token_ids) // block_tokens) - match.num_held > self._pool.available:
            return False
        if self._pool.windows:  # it may begin with less of its prefix than has been matched
            anywhere = self.place(request)
            needed = blocks_needed(anywhere, len(request.prompt_token_ids))
            return all(window.may_fit(needed, anywhere) for window in self._pool.windows)
        if not match.num_blocks:
            return self._fits_by_number(job, self._placement(request), Counter(), Counter(), alone=alone)
        owners, kept, unheld = match.counts()
        behind, own = self._behind(request, owners, match.last.owner), self._placement(request)
        is_used = max(blocks_needed(behind, request.num_rows)) <= self._config.most_blocks
        depends = False  # on where each of the blocks is, whether the prefix is used
        if self._config.batch_invariant and isinstance(own, Local):
            is_used = is_used and len(owners) == 1
        elif self._config.batch_invariant:
            depends = True
        if (not is_used or depends) and self._fits_by_number(job, own, Counter(), Counter(), alone=alone):
            return True
        if not is_used:
            return False
        if match.num_blocks * block_tokens <= most_tokens:
            return self._fits_by_number(job, behind, kept, unheld, alone=alone)
        last = Counter({match.last.owner: 1})
        shared = kept - last if isinstance(match.last, Block) else kept
        if self._fits_by_number(job, behind, shared, unheld, alone=alone):
            return True
        # Without the block that the prefix does not fill.
        before = match.owner_before_last
        placement = self._placement(request) if before is None else self._behind(request, owners - last, before)
        unheld -= self._pool.unheld([match.last] if isinstance(match.last, Block) else [])
        return self._fits_by_number(job, placement, shared, unheld, alone=alone)

    def _behind(self, request: Request, owners: Counter[int], last: int) -> Behind:
        """As `_placement_behind`, when only the number of blocks on each rank is known."""
        return Behind(self._placement(request, last, owners), owners, last)

    def _fits_by_number(
        self, job: Job, placement: Placement | Behind, shared: Counter[int], unheld: Counter[int], *, alone: bool
    ) -> bool:
        """Whether a request fits that shares so many full blocks of each rank. unheld: blocks that nobody holds."""
        room, promised = self._room(job, placement, shared)
        return self._pool.fits(room, promised, unheld, alone=alone)

    def _begin(self, job: Job, *, alone: bool) -> StartedSequence | None:
        """A request that begins to run. None: there is no room for it now, or no time for its guide.

        There is room for its whole prompt, because a prompt that lost its blocks half way would have to begin again.
        """
        history = job.history
        request = job.request
        for placement, prefix in self._beginnings(job, alone=alone):
            room, promised = self._room(job, placement, self._shared(prefix))
            unheld = self._pool.unheld(prefix.kept)
            if self._pool.fits(room, promised, unheld, alone=alone) and self._pool.fits_windows(
                promised, prefix, placement, alone=alone
            ):
                break
        else:
            return None
        clock = placement.start if self._config.own_clocks else 0  # of the ranks that sample its tokens
        if not self._guides.may_begin(request, clock):
            return None
        self._guides.begin(request, clock)
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        self._waiting.pop(request.id)
        kv = SequenceKV(placement=placement, room=room, promised=promised, block_ids=[array("q") for _ in room])
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
        """What a request may begin with, the best first."""
        request, (placement, prefix) = job.request, self._placed(job)
        yield placement, prefix
        # A block that is copied takes the room of two, which a request that fills the pool does not have.
        whole = self._whole(prefix, request)
        if whole.num_tokens != prefix.num_tokens:
            yield self._placement_behind(whole, request), whole
        # The cached blocks of a window and the promises together may exceed the pool. With nothing else running, no
        # blocks will become free, so the request begins without the prefix.
        if self._pool.windows and whole.num_tokens and alone:
            yield self._placement(request), NO_PREFIX

    def _shared(self, prefix: Prefix) -> Counter[int]:
        """How many full blocks of a prefix each rank has in its pool."""
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        return Counter([block.owner for block in full_blocks if isinstance(block, Block)])

    def _room(self, job: Job, placement: Placement | Behind, shared: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """The blocks that a request may come to have of each rank, and those that it is promised when it begins.
        shared: how many of each rank it need not be promised."""
        whole = blocks_needed(placement, job.request.num_rows)
        bound = job.history.preemptions >= MOST_PREEMPTIONS
        wanted = whole if bound else blocks_needed(placement, len(job.request.prompt_token_ids))
        later = () if self._config.batch_invariant else later_ranks(placement)
        most = max((whole[rank] for rank in later), default=0)
        room = [most if rank in later else count for rank, count in enumerate(whole)]
        return room, [count - shared[rank] for rank, count in enumerate(wanted)]

    def _whole(self, prefix: Prefix, request: Request) -> Prefix:
        """The prefix without a block that it does not fill."""
        num_tokens = prefix.num_tokens // self._config.block_tokens * self._config.block_tokens
        return prefix if num_tokens == prefix.num_tokens else self._cut(prefix, request, num_tokens)

    def _cut(self, prefix: Prefix, request: Request, most_tokens: int) -> Prefix:
        """The longest part of a request's prefix that is there in all groups."""
        prefix = prefix.cut(most_tokens, self._config.block_tokens)
        return prefix if self._cache is None else self._cache.within_windows(request, prefix)

    def _placement_behind(self, prefix: Prefix, request: Request) -> Placement:
        """The request's own placement, which goes on after the blocks of a prefix."""
        owners = tuple(map(attrgetter("owner"), prefix.blocks))
        if not owners:
            return self._placement(request)
        return Continued(self._placement(request, owners[-1], set(owners)), owners)

    def _placed(self, job: Job) -> tuple[Placement, Prefix]:
        """A request's placement, and the prefix that it begins with.

        There is no prefix where it would make a rank hold more than any rank may need to, or make the request's bits
        depend on who has computed it, nor of what rows have yet to be computed for, because they are scored.
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
        # Merges add up in the order of the ranks, and only what is local may be anywhere.
        alone = self.place(request, continued.start) if isinstance(placement, Local) else placement
        if self._config.batch_invariant and not continued.follows(alone):
            return placement, NO_PREFIX
        return continued, prefix

    def _most_cached_tokens(self, job: Job) -> int:
        """The length of the longest prefix that a request may begin with."""
        request = job.request
        if request.sampling.prompt_logprobs is not None and job.history.scored_tokens < request.given_tokens - 1:
            return job.history.scored_tokens
        # One token is left, because its logits are wanted.
        return len(request.prompt_token_ids) - 1

    def _take_over(self, prefix: Prefix, seq: Sequence) -> tuple[tuple[Block, ...], tuple[tuple[Block, Block], ...]]:
        """Begin a sequence with the KV blocks of its prefix: full blocks are shared, a block that is not full is
        copied, and what is swapped is swapped in. Returns its blocks and the copies."""
        full_blocks = prefix.full_blocks(self._config.block_tokens)
        rest = prefix.blocks[len(full_blocks) :]
        copied = prefix.copied if any(isinstance(block, Block) for block in rest) else ()
        swapped = [block for block in rest if isinstance(block, Slot)]
        if copied:
            self._pool.borrow(copied)
        new = list(seq.kv.promised)
        blocks = self._pool.begin(seq, full_blocks)
        self._pool.begin_windows(seq, new, prefix)
        seq.length = prefix.num_tokens
        own = self._pool.take_needed(seq)
        self._pool.swaps.swap_in(swapped, own[: len(swapped)])
        return self._pool.as_sent(seq, blocks + own), tuple(zip(copied, self._pool.as_sent(seq, own), strict=False))

    def place(self, request: Request, start: int = 0, later: tuple[int, ...] = ()) -> Placement:
        """A request's own placement from a KVP rank on. later: see `Growing`."""
        limit_tokens = self._limits.of(request)
        return self._config.place(request.given_tokens, request.capacity_tokens, start, later, limit_tokens)

    def _placement(self, request: Request, last: int | None = None, held: Collection[int] = ()) -> Placement:
        """Return a request's own placement behind blocks on the ranks `held`; `last` is the rank of the last block.

        It begins on the rank with the most free blocks, which spreads short requests and the ends of long ones.
        """
        limit_tokens = request.service.growth_limit_tokens
        name = self._config.placement_of(request.given_tokens, request.capacity_tokens, limit_tokens)
        if self._config.batch_invariant and name != "local":
            return self.place(request)
        start, *later = self._pool.in_order(last, held)
        return self.place(request, start, tuple(later))


def _known_tokens(request: Request, prefix: Prefix) -> KnownTokens:
    """Return the tokens that ranks need of a request that begins with a prefix."""
    seen_ids, generated_ids = prefix.seen_token_ids(request), request.generated_token_ids
    return KnownTokens(seen_ids, generated_ids) if seen_ids or generated_ids else NO_TOKENS
