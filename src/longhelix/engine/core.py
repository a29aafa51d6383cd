"""The token core: takes token ids and returns token ids. It handles no text, reads no files and prints nothing."""

import math
import secrets
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from longhelix.compute.models.rope import all_frequencies
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.trace import TraceEvent
from longhelix.engine.counters import Counters
from longhelix.engine.exchanges import ExchangeLog
from longhelix.engine.guides import Guides
from longhelix.engine.hosts.cluster import Cluster
from longhelix.engine.observation import Observation, ObservedStep, StepLog, observe
from longhelix.engine.pass_totals import totals
from longhelix.engine.prompt import token_ids
from longhelix.engine.rank_runner import RankRunner
from longhelix.engine.request_checks import check_images, check_token_ids, check_types
from longhelix.engine.shown_images import ShownImage, ShownImages
from longhelix.engine.workers.pool import WorkerPool
from longhelix.engine.workers.transport import LoadBlocks, SaveBlocks
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.cache_record import CacheChanges, CacheRecord
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.loop import Loop, leads_of, most_in_flight
from longhelix.scheduler.pinned_prefix import PinnedPrefix
from longhelix.scheduler.policy import Policy
from longhelix.scheduler.recording import Event
from longhelix.scheduler.request import ANY_SERVICE, Request, SamplingParams, ServiceLevel
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.token_event import TokenEvent, Usage


class TokenCore:
    """Runs requests of token ids on the ranks of a layout.

    Call `add` to queue a request, and call `poll` to get the events of all requests. Use the core from one thread only.
    `poll` returns after its timeout at the latest. A step does no work for requests that are not part of it. After an
    error, all requests have ended and all rank processes have stopped. Every later call then raises EngineError with
    the reason.

    Raises:
        UserError: a request or a setting is invalid.
        EngineError: a rank failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_load: Callable[[float], None] = lambda share: None,
        on_warm_up: Callable[[float], None] = lambda share: None,
        on_traced: Callable[[int, list[TraceEvent]], None] = lambda rank, events: None,
        on_event: Callable[[Event], None] = lambda event: None,
        guides: Guides | None = None,
        cluster: Cluster | None = None,
        on_cache_changes: Callable[[CacheChanges], None] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            config: the engine's configuration.
            on_load: called with the fraction of the weights that has been loaded, from 0 to 1.
            on_warm_up: called with the fraction of the warm-up that has been completed, from 0 to 1.
            on_traced: called with a rank and its trace events of one step, if steps are traced.
            on_event: called with each scheduler event. Pass a list's `append` to record events for a replay.
            guides: checks guides and provides the token table. If None, requests with guides are rejected.
            cluster: the other hosts that run ranks. None if there are none.
            on_cache_changes: called with what the prefix cache has stored and removed, after each change. If None,
                changes are not recorded.
            policy: which request goes first. If None, the policy that the configuration names.
        """
        self.config = config
        self._on_cache_changes = on_cache_changes
        self.counters = Counters(exchanges=ExchangeLog(config.layout.kvp))
        self._failure = ""  # why the core ended; empty while the core runs
        self._next_id = 0
        # The pool has no reference to this core. An unused core is therefore freed immediately, without the garbage
        # collector. The finaliser keeps the pool intact until then. Otherwise the garbage collector could close the
        # pool's sockets first.
        self._pool = WorkerPool(
            config,
            on_loaded=_shares(config, on_load),
            on_warmed=on_warm_up,
            on_traced=on_traced,
            cluster=cluster,
        )
        weakref.finalize(self, self._pool.close)
        layers = 0 if config.spec.vision is None else 1 + config.spec.vision.num_deepstack
        self._images = ShownImages(layers, config.image_bytes)
        self._guides = guides
        self._scheduler = Scheduler(
            config.scheduler,
            self._pool.cost,
            policy,
            cut=self._pool.cut,
            root=_root(config),
            swap_s=self._pool.cost.swap_seconds(config.scheduler.block_tokens),
            record=None if on_cache_changes is None else CacheRecord(len(config.scheduler.cache.windows)),
        )
        cost = self._scheduler.cost
        self._steps = StepLog(lambda work: None if cost is None else cost.seconds(work))

        def notify(event: Event) -> None:
            self._steps.on_event(event)
            on_event(event)

        pp = config.layout.pp
        runner = RankRunner(self._pool, config, self._images, guides)
        self._loop = Loop(
            scheduler=self._scheduler,
            runner=runner,
            clock=time.monotonic,
            depth=most_in_flight(pp),
            leads=leads_of(pp),
            on_event=notify,
        )

    def close(self) -> None:
        """Stop the processes of all ranks. You may call this method more than once."""
        self._failure = self._failure or "it was closed"
        self._pool.close()

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each rank."""
        return self._pool.process_ids

    @property
    def has_work(self) -> bool:
        """True if there is a step to run, or a running step to wait for."""
        return self._loop.has_work

    @property
    def has_failed(self) -> bool:
        """True if the core has failed or was closed."""
        return self._failure != ""

    def check_running(self) -> None:
        """Raise EngineError with the reason if the core has ended."""
        if self._failure:
            raise EngineError(f"the engine has ended: {self._failure}: make a new one")

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        service: ServiceLevel = ANY_SERVICE,
        arrival_s: float | None = None,
        images: Sequence[ShownImage] = (),
    ) -> Request:
        """Queue a prompt of token ids. `poll` returns its events.

        Args:
            prompt: token ids.
            sampling: how to choose tokens.
            service: client, priority and deadlines of the request.
            arrival_s: when the request arrived, in seconds of the monotonic clock. The default is now.
            images: the images of the prompt, in order.

        Raises:
            UserError: the request can never run.
        """
        request = self.request(prompt, sampling=sampling, service=service, arrival_s=arrival_s, images=images)
        self.queue(request, images)
        return request

    def request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        service: ServiceLevel = ANY_SERVICE,
        arrival_s: float | None = None,
        images: Sequence[ShownImage] = (),
    ) -> Request:
        """Create a request with a new id but do not queue it. Accepts the same arguments as `add`."""
        self.check_running()
        check_types(sampling, service)
        prompt_ids = token_ids(prompt, self.config.spec.vocabulary.size, self.config.scheduler.max_model_len)
        check_images(prompt_ids, images, self.config.spec.vision)
        eos_token_ids = self.config.spec.vocabulary.eos_token_ids
        check_token_ids(sampling, self.config.spec.vocabulary)
        guide_s = 0.0 if sampling.guide is None else self._check_guide(sampling.guide)
        request = Request(
            id=self._next_id,
            prompt_token_ids=prompt_ids,
            sampling=sampling,
            stop_token_ids=frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
            service=service,
            images=tuple(image.span for image in images),
            guide_s=guide_s,
        )
        self._scheduler.check(request)
        self._next_id += 1
        return request

    def queue(self, request: Request, images: Sequence[ShownImage], hashes: Sequence[bytes] = ()) -> None:
        """Queue a new request, or the rest of a request that ran in the previous core.

        The ranks receive the request with its first step. hashes: see `Scheduler.add`.
        """
        self.check_running()
        if images:
            self._images.add(request.id, images)
        try:
            self._loop.add(request, hashes)
        except BaseException:
            self._images.forget(request.id)
            raise

    def follow(self, ended: "TokenCore") -> None:
        """Continue the counters and the request ids of another core, which has ended."""
        self.counters, self._next_id = ended.counters, ended._next_id

    def _check_guide(self, guide: Guide) -> float:
        if self._guides is None:
            raise UserError("this engine has no tokenizer, so its requests cannot have guides: use LLM")
        return self._guides.check(guide)

    def abort(self, request_id: int) -> Usage | None:
        """End a request, whether it is waiting or running. Returns its usage, or None if it had already ended."""
        self._images.forget(request_id)
        return self._loop.abort(request_id)

    @property
    def cost_factors(self) -> tuple[float, float]:
        """Ratios of measured to predicted step time, for decode-only steps and for steps with prefill."""
        cost = self._loop.scheduler.cost
        assert cost is not None
        return cost.decode_factor, cost.chunk_factor

    def ran_steps(self) -> list[ObservedStep]:
        """Return the steps that have finished since the last call."""
        return self._steps.take()

    def observe(self) -> Observation:
        """Return the engine's current state."""
        return observe(self._scheduler)

    @property
    def still_s(self) -> float:
        """Seconds since any rank last made progress in the running step. Any thread may read this property."""
        return self._pool.still_s

    def prefilled_tokens(self, request_id: int) -> int:
        """Return how many of a request's prompt tokens have been sent to the ranks. While it waits, this is 0."""
        return self._scheduler.prefilled_tokens(request_id)

    def has_begun(self, request_id: int) -> bool:
        """Return whether a step with this unfinished request was sent to the ranks.

        If so, the request may be the cause of a failure.
        """
        return self._scheduler.has_begun(request_id)

    @property
    def image_bytes(self) -> int:
        """Memory that images of waiting requests use in this process, in bytes. Any thread may read this property."""
        return self._images.num_bytes

    def poll(self, timeout_s: float = math.inf) -> list[TokenEvent]:
        """Start every step that can start, then wait at most `timeout_s` seconds for the oldest step.

        Returns:
            The events of the oldest step. The list is empty if this step takes longer than the timeout, if it produced
            no token, or if there is nothing to run.
        """
        self.check_running()
        try:
            stepped = self._loop.step(timeout_s)
            self._tell_changes()
            if stepped is None:
                return []
            result, events = stepped
            self.counters.add(result)
            for event in events:
                if event.finish_reason is not None:
                    self._images.forget(event.request_id)
        except BaseException as error:
            self.fail(error)
            raise
        return events

    def _tell_changes(self) -> None:
        """Report what the prefix cache has stored and removed since the last call, unless the core has failed."""
        if self._on_cache_changes is not None and not self._failure:
            changes = self._scheduler.pool.changes()
            if any(changes):
                self._on_cache_changes(changes)

    def watch(self) -> None:
        """Check the ranks while there is no work. Raises EngineError if a rank has failed."""
        self.check_running()
        assert not self.has_work, "while there is work, `poll` notices failures"
        try:
            self._pool.collect(0.0)
        except BaseException as error:
            self.fail(error)
            raise

    def hashes(self, prompt_ids: "array[int]", capacity_tokens: int, cache_salt: str) -> list[bytes]:
        """Return a prompt's block hashes (see `PrefixCache.hashes`). Any thread may call this method."""
        return self._scheduler.hashes(_prefilled(prompt_ids, capacity_tokens, cache_salt))

    def has_cached(self, hashes: Sequence[bytes]) -> bool:
        """Return whether all blocks of a prompt are cached. If so, they become the last blocks to be evicted."""
        return self._scheduler.pool.has_cached(hashes)

    def pin_prefix(
        self, prompt_ids: "array[int]", capacity_tokens: int, cache_salt: str, hashes: Sequence[bytes]
    ) -> PinnedPrefix | None:
        """Pin the KV blocks of a prompt, as a request with this capacity and salt would do (`Scheduler.pin_prefix`).

        hashes: the block hashes that the method `hashes` returned for the same arguments.
        """
        return self._scheduler.pin_prefix(_prefilled(prompt_ids, capacity_tokens, cache_salt), hashes)

    @contextmanager
    def releasing(self, pinned: PinnedPrefix) -> Iterator[None]:
        """Return a context manager that releases pinned blocks when it exits."""
        try:
            yield
        finally:
            pinned.release(self._scheduler.pool)
            self._tell_changes()

    def publish(self, pinned: PinnedPrefix) -> None:
        """Make pinned blocks available to requests. The ranks must have filled these blocks."""
        pinned.publish(self._scheduler.pool)

    def carry(self, message: SaveBlocks | LoadBlocks) -> None:
        """Have all ranks save or load KV blocks.

        Raises:
            UserError: a file is damaged, or the disk failed. The engine continues to run.
        """
        self.check_running()
        try:
            refusal = self._pool.carry(message)
        except BaseException as error:
            self.fail(error)
            raise
        if refusal is not None:
            raise refusal

    def fail(self, error: BaseException) -> None:
        """Stop all ranks and store the reason.

        After an error, the core cannot continue. A step may be incomplete, so the engine and the ranks may have
        different states.
        """
        if not self._failure:
            self._failure = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        self.close()

    def expert_load(self) -> list[list[int]] | None:
        """Return the number of rows that each expert has processed since the start.

        Each call queries the ranks. Steps do not wait for the answer.

        Returns:
            Number of rows by layer and expert. A layer without experts has an empty list. None for a model without
            experts.
        """
        if not self.config.spec.moes:
            return None
        self.check_running()
        try:
            ranks = self._pool.expert_rows(self.config.layout.expert_group_leaders())
        except BaseException as error:
            self.fail(error)
            raise
        leaders = len(ranks) // self.config.layout.pp
        stages = [ranks[first : first + leaders] for first in range(0, len(ranks), leaders)]
        return [list(chain.from_iterable(groups)) for stage in stages for groups in zip(*stage, strict=True)]

    def pass_report(self) -> dict[str, Any] | None:
        """Return what the sequence-parallel pass changed in the graphs of one rank of each stage.

        The report has the form of `longhelix.passes.SequenceParallel.report`. It is None if the pass is off.
        """
        if not self.config.execution.token_ranges.by_pass:
            return None
        self.check_running()
        try:
            return totals(self._pool.pass_reports())
        except BaseException as error:
            self.fail(error)
            raise


def _root(config: EngineConfig) -> Callable[[Request], bytes]:
    """Return a function that computes an identifier for everything that a request's KV depends on, except its tokens.

    For some kinds of RoPE, the KV depends on the maximum length of the request.
    """
    if all(rotation.rope.scaling.kind not in ("dynamic", "longrope") for rotation in config.spec.rotations):
        return lambda request: b""
    return lambda request: repr(all_frequencies(config.spec, request.num_rows)).encode()


def _prefilled(prompt_ids: "array[int]", capacity_tokens: int, cache_salt: str) -> Request:
    """Return a request that describes a prompt's KV. This request is never queued."""
    sampling = SamplingParams(max_new_tokens=capacity_tokens - len(prompt_ids))
    return Request(
        id=-1,
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        stop_token_ids=frozenset(),
        seed=0,
        arrival_s=0.0,
        service=ServiceLevel(cache_salt=cache_salt),
    )


def _shares(config: EngineConfig, on_load: Callable[[float], None]) -> Callable[[int], None]:
    """Return a callback that adds up the loaded weight elements and calls `on_load` with their fraction."""
    total = sum(config.weight_elements(rank) for rank in range(config.layout.world_size))
    loaded = 0

    def report(elements: int) -> None:
        nonlocal loaded
        loaded += elements
        on_load(loaded / total)

    return report
