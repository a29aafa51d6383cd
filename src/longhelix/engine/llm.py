"""The class `LLM`, which takes prompts and returns results. It owns the tokenizer and the token core."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from longhelix.compute.cache.context_folder import ContextFolder
from longhelix.compute.cache.saved_context import SavedContext
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.trace import TraceFile
from longhelix.engine.contexts import LOWEST_PRIORITY, Contexts, LoadedContext, ReadContext
from longhelix.engine.core import TokenCore
from longhelix.engine.guides import Guides
from longhelix.engine.hosts.joining import join_hosts
from longhelix.engine.hub.download import find
from longhelix.engine.images import Images
from longhelix.engine.kv_events import KVEventPublisher
from longhelix.engine.live import Live
from longhelix.engine.lost_requests import LostRequests
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.options import EngineOptions
from longhelix.engine.prompt import ImagePrompt, Prompt, ReadPrompt, as_prompts
from longhelix.engine.prompt_reader import PromptReader
from longhelix.engine.request_checks import check_types
from longhelix.engine.resolution import resolve
from longhelix.engine.result import Delta, Result
from longhelix.engine.sampling_defaults import gguf_generation_config, sampling_defaults
from longhelix.engine.saving import Computing, Saving
from longhelix.engine.stream import Stream
from longhelix.engine.text.reasoning import ReasoningSplitter
from longhelix.engine.text.stop_strings import StopStrings
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.engine.workers import ranks, torchrun
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import Guide, ReasoningTags
from longhelix.scheduler.policy import Policy
from longhelix.scheduler.request import ANY_SERVICE, MOST_TOKENS, SamplingParams, ServiceLevel
from longhelix.scheduler.token_event import FinishReason, TokenEvent, Usage
from longhelix.spec.layout import Layout
from longhelix.values import real, refused, whole

# A request that computes a context must sample one token. The engine discards this token.
_ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)


class LLM:
    """A model that runs on the ranks of a layout.

    Each rank is a process. Call `close` at the end, or use the engine in a `with` statement.

    Args:
        model: "builtin", a folder in Hugging Face format, a GGUF file, or a hub ID such as "Qwen/Qwen3-8B".
        layout: how the model is sharded across the ranks. By default, one rank runs the whole model.
        revision: branch, tag or commit of a hub ID; "main" by default.
        on_load: called with the fraction of the weights that has been loaded, from 0 to 1.
        on_warm_up: called with the fraction of the warm-up that has been completed, from 0 to 1.
        policy: which request goes first. By default, the one that arrived first.
        settings: other engine settings. Each one is a field of `EngineOptions`.

    Raises:
        UserError: the model, the layout or a setting is invalid, or they cannot be used together.
        EngineError: a rank failed.
    """

    def __init__(
        self,
        model: str,
        layout: Layout | None = None,
        *,
        revision: str | None = None,
        on_load: Callable[[float], None] = lambda share: None,
        on_warm_up: Callable[[float], None] = lambda share: None,
        policy: str | Policy = "fcfs",
        **settings: Any,
    ) -> None:
        layout = Layout() if layout is None else layout
        if not isinstance(model, str | os.PathLike):
            raise refused("model", model, '"builtin", the path of a folder or a GGUF file, or a hub ID')
        _check_callbacks(on_load=on_load, on_warm_up=on_warm_up)
        self._policy = policy if isinstance(policy, Policy) else None
        options = EngineOptions.of(settings | ({} if isinstance(policy, Policy) else {"policy": policy}))
        path = find(str(model), revision)  # first, because ranks under torchrun wait for each other only so long
        if isinstance(layout, Layout):  # `resolve` rejects anything else
            torchrun.join(layout.world_size)
        checkpoint = open_checkpoint(path)
        ranks.prepare()
        self._cluster = join_hosts(options, layout, checkpoint.path)
        try:
            self._start(str(model), checkpoint, layout, options, on_load, on_warm_up)
        except BaseException as error:
            if self._cluster is not None:
                self._cluster.close(error if isinstance(error, UserError) else None)
            raise

    def _start(
        self,
        model: str,
        checkpoint: SafetensorsCheckpoint | GgufCheckpoint,
        layout: Layout,
        options: EngineOptions,
        on_load: Callable[[float], None],
        on_warm_up: Callable[[float], None],
    ) -> None:
        """Read the model's tokenizer and start the ranks."""
        self.config = resolve(checkpoint, layout, options, None if self._cluster is None else self._cluster.places)
        self.tokenizer = (
            Tokenizer.from_gguf(checkpoint.metadata)
            if isinstance(checkpoint, GgufCheckpoint)
            else Tokenizer.from_folder(checkpoint.path)
        )
        self._generation_config = (
            gguf_generation_config(checkpoint.metadata)
            if isinstance(checkpoint, GgufCheckpoint)
            else checkpoint.generation_config
        )
        self.config = _with_ends(self.config, self.tokenizer.end_ids)
        self.tokenizer.max_model_len = self.config.scheduler.max_model_len
        self._guides = Guides(self.tokenizer, self.config.spec)
        self._closed = False
        self._live: dict[int, Live] = {}
        self._lost = LostRequests()
        self._deltas: deque[Delta] = deque()  # for requests queued with `add`; `step` returns them
        self._abandoned: deque[int] = deque()  # requests to abort because their stream was dropped
        self._savings: list[Saving] = []
        self._trace = None if options.trace is None else TraceFile(options.trace)
        on_traced = (lambda rank, events: None) if self._trace is None else self._trace.write
        self._kv_events: KVEventPublisher | None = None
        try:
            limits = [window.visibility for window in self.config.scheduler.cache.windows]
            self._kv_events = KVEventPublisher.of(options, limits)
            self._new_core = partial(
                TokenCore,
                self.config,
                on_traced=on_traced,
                guides=self._guides,
                cluster=self._cluster,
                on_cache_changes=None if self._kv_events is None else self._kv_events.publish,
                policy=self._policy,
            )
            self._core = self._new_core(on_load, on_warm_up)
        except BaseException:
            if self._trace is not None:
                self._trace.close()
            if self._kv_events is not None:
                self._kv_events.close()
            raise
        self._images = Images(self.config, checkpoint)
        self.contexts_folder = ContextFolder(options.contexts_dir)
        self._contexts = Contexts(self._core, model, checkpoint, self.contexts_folder)
        self._prompts = PromptReader(self.tokenizer, self._images, self._contexts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            self.close()

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling settings that the model's publisher recommends, by field of `SamplingParams`.

        They come from generation_config.json or from a GGUF file's metadata. The result is empty if there are none.
        Values out of range are left out with a warning.
        """
        return sampling_defaults(self._generation_config)

    def close(self) -> None:
        """Stop the processes of all ranks. You may call this method more than once."""
        self._closed = True
        with ExitStack() as ends:  # if one callback fails, the others still run
            if self._cluster is not None:
                ends.callback(self._cluster.close, has_failed=self._core.has_failed)
            if self._kv_events is not None:
                ends.callback(self._kv_events.close)
            ends.callback(self._end)
            ends.callback(self._guides.close)
            ends.callback(self._savings.clear)
            for saving in self._savings:
                ends.callback(saving.end, EngineError("the engine was closed"))

    def _end(self) -> None:
        try:
            self._core.close()
        finally:
            if self._trace is not None:
                self._trace.close()

    def restart(
        self,
        most_failures: int = 1,
        *,
        on_load: Callable[[float], None] = lambda share: None,
        on_warm_up: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Start the ranks again after an EngineError.

        Unfinished requests continue after the last token they produced. No token is repeated or lost.

        Args:
            most_failures: a request ends with an error if it was running during more failures than this. The count of
                a request starts again at 0 when the request has produced two tokens after a restart.
            on_load: as in the constructor. If it raises an exception, the restart is aborted.
            on_warm_up: as in the constructor. If it raises an exception, the restart is aborted.

        Raises:
            EngineError: the ranks cannot start. You may call `restart` again.
            UserError: `most_failures` is not a non-negative integer, or there is another error that the constructor
                raises too, such as too little memory. You may call `restart` again.
        """
        most_failures = whole("most_failures", most_failures, 0, MOST_TOKENS)
        _check_callbacks(on_load=on_load, on_warm_up=on_warm_up)
        if self._closed:
            raise EngineError("the engine was closed and cannot restart: make a new LLM")
        if not self._core.has_failed:
            raise EngineError("the engine has not failed: call restart only after an EngineError")
        if self._trace is not None:
            raise EngineError("an engine that writes a trace cannot restart: make a new LLM, or leave out trace")
        if torchrun.is_active():
            raise EngineError("an engine whose ranks torchrun started cannot restart: torchrun starts all ranks again")
        ranks.prepare()
        if self._kv_events is not None:
            self._kv_events.clear()
        core = self._new_core(on_load, on_warm_up)
        self._lost.add(self._live.values(), self._core)
        self._live.clear()
        core.follow(self._core)
        self._core = core
        self._contexts.use(core)
        for saving in self._savings:
            saving.begin_again(most_failures)
        for live in self._lost.failing(most_failures):
            usage = Usage((0,) * self.config.layout.kvp)
            error = f"the engine failed {live.failures} times while this request ran"
            live.deltas.append(Delta(live.request.id, "", self._result(live, "error", usage, error)))

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each rank."""
        return self._core.process_ids

    @property
    def has_work(self) -> bool:
        """True if `step` has work to run or deltas to return."""
        lost = bool(self._lost) and not self._core.has_failed
        return lost or bool(self._deltas or self._savings) or self._core.has_work

    @property
    def is_saving(self) -> bool:
        """True if contexts are being computed or written. Any thread may read this property."""
        return bool(self._savings)

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        service: ServiceLevel = ANY_SERVICE,
        *,
        context: str | ReadContext | None = None,
        arrival_s: float | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> int:
        """Queue a prompt and return the request's id. `step` returns the request's deltas.

        Args:
            prompt: text, token ids, or a prompt with images.
            sampling: how to choose tokens. The default is `SamplingParams()`.
            service: client, priority and deadlines of the request.
            context: saved context that the prompt continues. Give its name, or the result of `read_context`.
            arrival_s: when the request arrived, in seconds of `time.monotonic`. The default is now. Deadlines and the
                time to first token are measured from this time.
            reasoning: tags that the model writes around its reasoning (see `Tokenizer.reasoning_tags`). If given, the
                reasoning is returned separately from the answer.

        Raises:
            UserError: the request can never run.
        """
        return self._queue(
            prompt,
            sampling=sampling,
            service=service,
            deltas=self._deltas,
            context=context,
            arrival_s=arrival_s,
            reasoning=reasoning,
        )

    def read(self, prompt: ImagePrompt) -> ReadPrompt:
        """Open a prompt's images and run the vision tower on them, so that `add` does not have to.

        You may call this method on another thread while the engine runs steps, but not on two threads at once.

        Raises:
            UserError: `add` would reject the prompt or its images.
        """
        read = self._images.read(prompt, self._prompts.token_ids)
        return ReadPrompt(read.token_ids, [image.seen() for image in read.images])

    def read_context(self, name: str, cache_salt: str = "") -> ReadContext:
        """Read the token ids of a saved context and return the context in a form that `add` accepts.

        Requests that use the result must have the same cache_salt. Like `read`, you may call this method on another
        thread while the engine runs steps. A context of a million tokens takes about 0.1 s.

        Raises:
            UserError: `add` would reject the context.
        """
        return self._contexts.read(name, cache_salt)

    @property
    def image_bytes(self) -> int:
        """Memory that images of waiting requests use in this process, in bytes. Any thread may read this property."""
        return self._core.image_bytes

    def check_guide(self, guide: Guide) -> None:
        """Raise UserError if no text of this model can follow the guide.

        `add` makes the same check. The engine caches the results, so `add` is faster if you call this method
        beforehand on another thread.
        """
        self._guides.check(guide)

    def knows_guide(self, guide: Guide) -> bool:
        """Return whether `check_guide` has already accepted the guide. This method does not wait for a check.

        Raises:
            UserError: `check_guide` has already rejected the guide. The error is the same.
        """
        return self._guides.knows(guide)

    def save_context(
        self, name: str, prompt: Prompt, service: ServiceLevel = LOWEST_PRIORITY, *, replace: bool = False
    ) -> SavedContext:
        """Compute a prompt's KV and save it on disk under a name.

        Args:
            name: name of the context.
            prompt: text or token ids.
            service: service level of the request. The default has the lowest priority, so other requests run first.
            replace: whether to overwrite an existing context of the same name.

        Raises:
            UserError: the context cannot be saved. The files on disk have not changed.
        """
        saving = self.begin_saving(name, prompt, service, replace=replace)
        try:
            while not saving.has_ended:
                self._advance_unfinished()
        except BaseException:
            saving.end(EngineError("saving was interrupted"))
            raise
        return saving.result()

    def begin_saving(
        self, name: str, prompt: Prompt, service: ServiceLevel = LOWEST_PRIORITY, *, replace: bool = False
    ) -> Saving:
        """Start saving a context and return immediately. Later calls of `step` do the work.

        Accepts the same arguments as `save_context`.

        Raises:
            UserError: the context cannot be saved. Only errors that are known before the computation are raised here.
        """
        self._core.check_running()
        check_types(_ONE_TOKEN, service)
        new = self._contexts.new(name, self._prompts.token_ids(prompt), service.cache_salt, replace)
        computing = Computing(
            lambda deltas: self._queue(
                new.token_ids, sampling=_ONE_TOKEN, service=service, deltas=deltas, context=None
            ),
            self.prefilled_tokens,
            self.abort,
        )
        saving = Saving(self._contexts, new, computing)
        self._savings.append(saving)
        return saving

    def load_context(self, name: str, cache_salt: str = "") -> LoadedContext:
        """Load a saved context into the prefix cache. The context may have been saved with a different layout.

        Requests that have the same salt and begin with the context's tokens reuse its KV until the cache evicts it.
        Blocks that are already in the cache are not read again.

        Raises:
            UserError: the context is damaged or does not fit.
        """
        self._core.check_running()
        return self._contexts.load(name, cache_salt)

    @property
    def cost_factors(self) -> tuple[float, float]:
        """Ratios of measured to predicted step time, for decode-only steps and for steps with prefill.

        The scheduler corrects its predictions by these factors when it chooses chunk sizes.
        """
        return self._core.cost_factors

    def ran_steps(self) -> list[ObservedStep]:
        """Return the steps that have finished since the last call. Only the last few thousand steps are kept."""
        return self._core.ran_steps()

    def observe(self) -> Observation:
        """Return the engine's current state: running requests, where their KV is stored, and how full each rank is."""
        return self._core.observe()

    @property
    def still_s(self) -> float:
        """Seconds since any rank last made progress in the running step. Any thread may read this property.

        The watchdog stops the engine when this time exceeds a limit.
        """
        return self._core.still_s

    def prefilled_tokens(self, request_id: int) -> int:
        """Return how many of a request's prompt tokens have been sent to the ranks. While it waits, this is 0."""
        return self._core.prefilled_tokens(request_id)

    def step(self) -> list[Delta]:
        """Run until the oldest step in flight finishes.

        Returns the deltas that requests queued with `add` have produced since the last call.

        Raises:
            EngineError: a rank failed. Deltas from before the failure that have not been returned are kept, and the
                next call returns them. All requests stop until you call `restart`.
        """
        if self._core.has_failed and self._deltas:
            return self._take_deltas()
        self._advance()
        return self._take_deltas()

    def watch(self) -> None:
        """Check the ranks while there is no work. Raises EngineError if a rank has failed."""
        self._core.watch()

    @property
    def has_failed(self) -> bool:
        """True if the engine has failed or was closed. In this state, no request runs."""
        return self._core.has_failed

    def _take_deltas(self) -> list[Delta]:
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    def _queue(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        service: ServiceLevel,
        deltas: deque[Delta],
        context: str | ReadContext | None,
        arrival_s: float | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> int:
        self._core.check_running()
        arrival_s = _checked_arrival(arrival_s, time.monotonic())
        sampling = SamplingParams() if sampling is None else sampling
        check_types(sampling, service)
        given = self._prompts.read(prompt, context, sampling, service)
        before = self._core.counters.exchanges.now
        request = self._core.request(
            given.token_ids, sampling=sampling, service=service, arrival_s=arrival_s, images=given.images
        )
        tags = frozenset() if reasoning is None else reasoning.special_ids
        stream = self.tokenizer.stream(request.prompt_token_ids, sampling.skip_special_tokens, tags)
        live = Live(
            request=request,
            tokens=stream,
            stops=StopStrings(sampling.stop, sampling.include_stop_str_in_output),
            deltas=deltas,
            arrival=before,
            context=given.context,
            images=[image.unseen() for image in given.images],
        )
        live.reasoning = None if reasoning is None else ReasoningSplitter(reasoning)
        if not self._lost.take(live, self._live):
            self._core.queue(request, given.images, given.hashes)
            self._live[request.id] = live
        return request.id

    def _next_delta(self, deltas: deque[Delta]) -> Delta:
        """Return the next delta from a queue. At least one request of the queue must not have ended.

        Deltas of other requests stay in their own queues.
        """
        while not deltas:
            self._advance_unfinished()
        return deltas.popleft()

    def _advance_unfinished(self) -> None:
        """Advance once, while at least one request has not ended. Raise EngineError if there is nothing to run."""
        if not self._advance():
            raise EngineError("a request has not ended, but the engine has nothing to run: this is a bug, report it")

    def _advance(self) -> bool:
        """Run until the oldest step in flight finishes, queue the deltas, and make progress on saved contexts.

        Returns False if there is nothing to do.
        """
        self._core.check_running()
        try:
            while self._abandoned:
                self.abort(self._abandoned.popleft())
            for live in self._lost.requeue(self._core, self._contexts, self._live):
                self._live[live.request.id] = live
            steps_before = self._core.counters.steps
            self._take(self._core.poll())
            saved = [saving.advance() for saving in self._savings]
            self._savings = [saving for saving in self._savings if not saving.has_ended]
        except BaseException as error:
            self._core.fail(error)
            self._end()
            raise
        return self._core.counters.steps > steps_before or any(saved)

    def _take(self, events: list[TokenEvent]) -> None:
        now_s = time.monotonic()
        # With draft tokens, a request may have several events, and its text may end before the last one.
        usages = {event.request_id: event.usage for event in events if event.usage is not None}
        ended: set[int] = set()
        for event in events:
            live = self._live.get(event.request_id)
            if live is not None and event.prompt_logprobs:
                live.prompt_logprobs += map(dict, event.prompt_logprobs)
            elif live is not None:
                delta = self._delivered(event, usages.get(event.request_id), now_s)
                live.deltas.append(delta)
                if delta.result is not None:
                    ended.add(event.request_id)
            elif event.request_id not in ended:
                # The call that added this request was interrupted before it recorded the request here.
                self._core.abort(event.request_id)

    def expert_load(self) -> list[list[int]] | None:
        """Return the number of rows that each expert has processed since the engine started.

        Each call queries the ranks. Steps do not wait for the answer.

        Returns:
            Number of rows by layer and expert. A layer without experts has an empty list. None for a model without
            experts.
        """
        return self._core.expert_load()

    def sequence_parallel_report(self) -> dict[str, Any] | None:
        """Return what the compiler pass of `enable_sp` changed in the graphs of one rank of each pipeline stage.

        Each call queries the ranks. docs/guides/sequence-parallel-passes.md explains the names. If a graph
        accepts any number of tokens, its bytes are for the number of tokens with which the graph was traced.

        Returns:
            {"patterns": {name: matches}, "collectives": {"before": {kind: count}, "after": {}}, "bytes": {"before":
            {dtype: bytes that a rank sends}, "after": {}}, "left_alone": [why a collective was not replaced]}. None if
            the pass is off.
        """
        return self._core.pass_report()

    def abort(self, request_id: int) -> Result | None:
        """End a request, whether it is waiting or running. The request's stream ends with the same result.

        Returns:
            The result so far, or None if the request had already ended.
        """
        usage = self._core.abort(request_id)
        live = self._live.pop(request_id, None)
        if live is None:
            live = self._lost.pop(request_id)
            usage = Usage((0,) * self.config.layout.kvp)
        if live is None or usage is None:
            return None
        result = self._result(live, "abort", usage)
        if live.deltas is self._deltas:  # queued with `add`, so the caller gets the result from this call
            kept = [delta for delta in self._deltas if delta.request_id != request_id]
            self._deltas.clear()
            self._deltas.extend(kept)
        else:
            live.deltas.append(Delta(request_id, "", result))
        return result

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        service: ServiceLevel = ANY_SERVICE,
        *,
        context: str | None = None,
    ) -> list[Result]:
        """Run prompts concurrently and return when all of them have ended.

        Args:
            prompts: one prompt or a sequence of prompts.
            sampling: how to choose tokens. The default is `SamplingParams()`.
            service: client, priority and deadlines of the requests.
            context: name of the saved context that each prompt continues.

        Returns:
            One result per prompt, in order.

        Raises:
            UserError: a prompt was rejected. In this case, none of the prompts run.
        """
        return self._run(as_prompts(prompts), sampling, service, context)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None,
        service: ServiceLevel,
        context: str | None,
    ) -> list[Result]:
        ids: list[int] = []
        deltas: deque[Delta] = deque()
        results: dict[int, Result] = {}
        try:
            for prompt in prompts:
                ids.append(self._queue(prompt, sampling=sampling, service=service, deltas=deltas, context=context))
            while len(results) < len(ids):
                delta = self._next_delta(deltas)
                if delta.result is not None:
                    results[delta.request_id] = delta.result
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [results[request_id] for request_id in ids]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        service: ServiceLevel = ANY_SERVICE,
        *,
        context: str | None = None,
    ) -> Stream:
        """Run one prompt and yield its text as it is produced. The last delta contains the result.

        Accepts the same arguments as `generate`, with a single prompt.
        """
        deltas: deque[Delta] = deque()
        request_id = self._queue(prompt, sampling=sampling, service=service, deltas=deltas, context=context)
        abandon = partial(self._abandoned.append, request_id)
        return Stream(partial(self._next_delta, deltas), partial(self.abort, request_id), abandon)

    def _delivered(self, event: TokenEvent, usage: Usage | None, now_s: float) -> Delta:
        """Return the delta that a token event produces. An exception in this method fails only this request.

        Args:
            usage: of the request, if the scheduler has ended it.
        """
        live = self._live[event.request_id]
        if event.finish_reason == "error":
            assert event.sampled is not None
            return Delta(event.request_id, "", self._ended(live, "error", usage, event.sampled.error))
        result = reasoning = None
        try:
            text, reasoning, finish_reason = live.take(event, now_s)
        except Exception as error:
            usage = usage or self._core.abort(event.request_id)
            text, result = "", self._ended(live, "error", usage, f"{type(error).__name__}: {error}")
        else:
            live.text += text
            if finish_reason is not None:
                result = self._ended(live, finish_reason, usage or self._core.abort(event.request_id))
        if event.sampled is None:
            return Delta(event.request_id, text, result, reasoning=reasoning)
        found = Delta(event.request_id, text, result, event.sampled.token_id, reasoning=reasoning)
        if live.request.sampling.logprobs is None:
            return found
        return replace(found, logprobs=live.logprobs[-1], token_text=live.token_texts[-1])

    def _ended(self, live: Live, finish_reason: FinishReason, usage: Usage | None, error: str | None = None) -> Result:
        """Remove a request that has ended and return its result."""
        del self._live[live.request.id]
        return self._result(live, finish_reason, usage, error)

    def _result(
        self,
        live: Live,
        finish_reason: FinishReason,
        usage: Usage | None,
        error: str | None = None,
    ) -> Result:
        assert usage is not None, "a request ends only once"
        return live.result(finish_reason, usage, error, config=self.config, counters=self._core.counters)


def _with_ends(config: EngineConfig, end_ids: Sequence[int]) -> EngineConfig:
    """Return the configuration with `end_ids` added to the tokens that end an answer."""
    vocabulary = config.spec.vocabulary
    own = {token_id for token_id in end_ids if token_id < vocabulary.size}.difference(vocabulary.eos_token_ids)
    vocabulary = replace(vocabulary, eos_token_ids=(*vocabulary.eos_token_ids, *sorted(own)))
    return replace(config, spec=replace(config.spec, vocabulary=vocabulary))


def _checked_arrival(arrival_s: float | None, now_s: float) -> float:
    """Return the arrival time of a request. Raises UserError for a time in the future or a non-finite value."""
    if arrival_s is None:
        return now_s
    allowed = "a time in the past, as time.monotonic() returned it, or leave it out"
    return real("arrival_s", arrival_s, lambda at_s: -math.inf < at_s <= now_s, allowed)


def _check_callbacks(**callbacks: object) -> None:
    """Raise UserError for a progress callback that cannot be called."""
    for name, callback in callbacks.items():
        if not callable(callback):
            raise refused(name, callback, "a function of one number")
