"""LLM: prompts in, results out. Holds the tokenizer and the token core, and gives every request its text."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from longhelix.compute.cache.context_folder import ContextFolder
from longhelix.compute.cache.saved_context import SavedContext
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.trace import TraceFile
from longhelix.engine.contexts import LOWEST, Contexts, LoadedContext, ReadContext
from longhelix.engine.core import TokenCore
from longhelix.engine.guides import Guides
from longhelix.engine.images import Images
from longhelix.engine.live import Live
from longhelix.engine.lost_requests import LostRequests
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.options import EngineOptions
from longhelix.engine.prompt import ImagePrompt, Prompt, ReadPrompt, as_prompts
from longhelix.engine.resolution import resolve
from longhelix.engine.result import Delta, Result
from longhelix.engine.saving import Computing, Saving
from longhelix.engine.shown_images import ShownImage
from longhelix.engine.stream import Stream
from longhelix.engine.text.reasoning import ReasoningSplitter
from longhelix.engine.text.stop_strings import StopStrings
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.engine.workers import ranks, torchrun
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import Guide, ReasoningTags
from longhelix.scheduler.request import ANY_SERVICE, MOST_TOKENS, SamplingParams, ServiceLevel
from longhelix.scheduler.token_event import FinishReason, TokenEvent, Usage
from longhelix.spec.layout import Layout
from longhelix.values import real, refused, whole

_ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)  # what computes a context samples it, and nobody reads


class LLM:
    """A model over the ranks of a layout. Close it, or use it in a `with` statement: its ranks are processes.

    model: "builtin", a folder in Hugging Face format, or a GGUF file. settings: those of `EngineOptions`, by name.
    on_load and on_warm_up are told the share of the weights, then of the warm-up, that is done, from 0 to 1.
    Raises UserError for input that cannot work, EngineError if a rank fails.
    """

    def __init__(
        self,
        model: str,
        layout: Layout | None = None,
        *,
        on_load: Callable[[float], None] = lambda share: None,
        on_warm_up: Callable[[float], None] = lambda share: None,
        **settings: Any,
    ) -> None:
        layout = Layout() if layout is None else layout
        if not isinstance(model, str | os.PathLike):
            raise refused("model", model, '"builtin", or the path of a folder or a GGUF file')
        _check_told(on_load=on_load, on_warm_up=on_warm_up)
        options = EngineOptions.of(settings)
        if isinstance(layout, Layout):  # what is none, `resolve` refuses
            torchrun.join(layout.world_size)
        checkpoint = open_checkpoint(str(model))
        ranks.prepare()
        self.config = resolve(checkpoint, layout, options)
        self.tokenizer = (
            Tokenizer.from_gguf(checkpoint.metadata)
            if isinstance(checkpoint, GgufCheckpoint)
            else Tokenizer.from_folder(checkpoint.path)
        )
        self.config = _with_ends(self.config, self.tokenizer.end_ids)
        self.tokenizer.max_model_len = self.config.scheduler.max_model_len
        self._guides = Guides(self.tokenizer, self.config.spec)
        self._closed = False
        self._live: dict[int, Live] = {}
        self._lost = LostRequests()
        self._deltas: deque[Delta] = deque()  # of requests that were added one by one: `step` gives them
        self._abandoned: deque[int] = deque()  # requests whose streams are gone
        self._savings: list[Saving] = []
        self._trace = None if options.trace is None else TraceFile(options.trace)
        on_traced = (lambda rank, events: None) if self._trace is None else self._trace.write
        self._new_core = partial(TokenCore, self.config, on_traced=on_traced, guides=self._guides)
        try:
            self._core = self._new_core(on_load, on_warm_up)
        except BaseException:
            if self._trace is not None:
                self._trace.close()
            raise
        self._images = Images(self.config, checkpoint)
        self.contexts_folder = ContextFolder(options.contexts_dir)
        self._contexts = Contexts(self._core, str(model), checkpoint, self.contexts_folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            self.close()

    def close(self) -> None:
        """End all ranks. May be called more than once."""
        self._closed = True
        with ExitStack() as ends:  # one that fails keeps none of the others
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
        """After an EngineError: start the ranks again. Requests that were added and had not ended go on from the tokens
        that they have given: none of these comes again, and none is left out.

        One that ran in more than `most_failures` failures, without two new tokens between them, ends with an error.
        on_load and on_warm_up: as of the constructor; what they raise ends the start. Raises EngineError if the ranks
        cannot start, or what the constructor does, such as UserError where memory is short, after which it may be tried
        again; UserError also for another `most_failures` than a whole number from 0.
        """
        most_failures = whole("most_failures", most_failures, 0, MOST_TOKENS)
        _check_told(on_load=on_load, on_warm_up=on_warm_up)
        if self._closed or not self._core.has_failed:
            raise EngineError("the engine was closed" if self._closed else "the engine has not failed")
        if self._trace is not None or torchrun.is_active():
            raise EngineError("ranks that are traced, or that torchrun started, are not started again")
        ranks.prepare()
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
            error = f"the engine has failed {live.failures} times while this request ran"
            live.deltas.append(Delta(live.request.id, "", self._result(live, "error", usage, error)))

    @property
    def process_ids(self) -> dict[int, int]:
        """Rank to process id."""
        return self._core.process_ids

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to run or to give."""
        lost = bool(self._lost) and not self._core.has_failed
        return lost or bool(self._deltas or self._savings) or self._core.has_work

    @property
    def is_saving(self) -> bool:
        """Whether contexts are computed or written. Any thread may ask."""
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
        """Queue a prompt, as text, as token ids or with images; it goes on after the saved context of that name. It
        came at `arrival_s` by `time.monotonic`, from when on its deadlines and its time to the first token count, or
        just now. Returns the request's id; `step` gives its deltas. reasoning: tags whose text is kept apart from the
        answer's (see `Tokenizer.reasoning_tags`).

        Raises UserError if it can never run.
        """
        return self._queue(prompt, sampling, service, self._deltas, context, arrival_s, reasoning)

    def read(self, prompt: ImagePrompt) -> ReadPrompt:
        """The prompt for `add` and the like, which then need not open its images, nor run the vision tower. Unlike all
        else it may run on another thread, one call at a time, while the engine steps. Raises UserError as they do."""
        read = self._images.read(prompt, self._token_ids)
        return ReadPrompt(read.token_ids, [image.seen() for image in read.images])

    def read_context(self, name: str, cache_salt: str = "") -> ReadContext:
        """Read a saved context, to give it to `add` with requests of the same cache_salt.

        Like `read`, it may run on another thread while the engine steps: it takes about 0.1 s for a million tokens.
        Raises UserError as `add` does.
        """
        return self._contexts.read(name, cache_salt)

    @property
    def image_bytes(self) -> int:
        """Bytes that images of waiting requests take in this process. Any thread may ask."""
        return self._core.image_bytes

    def check_guide(self, guide: Guide) -> None:
        """Raise UserError if no text of this model can follow it. `add` asks as well; what was found is kept, so that
        whoever asks here before, on any thread, spares it the time."""
        self._guides.check(guide)

    def knows_guide(self, guide: Guide) -> bool:
        """Whether `check_guide` has found before that it can be followed, which nobody waits for. Raises the UserError
        that it was refused with."""
        return self._guides.knows(guide)

    def save_context(
        self, name: str, prompt: Prompt, service: ServiceLevel = LOWEST, *, replace: bool = False
    ) -> SavedContext:
        """Compute a prompt's KV, after whatever else runs, and keep it on disk under a name. `replace`: also in place
        of the context that has it. Raises UserError if that cannot be; then nothing on the disk has changed."""
        saving = self.begin_saving(name, prompt, service, replace=replace)
        try:
            while not saving.has_ended:
                self._get_on()
        except BaseException:
            saving.end(EngineError("it was given up"))
            raise
        return saving.result()

    def begin_saving(
        self, name: str, prompt: Prompt, service: ServiceLevel = LOWEST, *, replace: bool = False
    ) -> Saving:
        """Begin what `save_context` does; `step` gets on with it beside all else. Raises UserError as that does, for
        what can be seen before anything is computed."""
        self._core.check_running()
        self._core.check_asked(_ONE_TOKEN, service)
        new = self._contexts.new(name, self._token_ids(prompt), service.cache_salt, replace)
        computing = Computing(
            lambda deltas: self._queue(new.token_ids, _ONE_TOKEN, service, deltas, None),
            self.prefilled_tokens,
            self.abort,
        )
        saving = Saving(self._contexts, new, computing)
        self._savings.append(saving)
        return saving

    def load_context(self, name: str, cache_salt: str = "") -> LoadedContext:
        """Have the ranks take up a saved context, unless they have it, whatever layout it was saved with: from here on
        requests with that salt that begin with its tokens begin with its KV, until others need the room. Raises
        UserError if it is damaged or does not fit."""
        self._core.check_running()
        return self._contexts.load(name, cache_salt)

    @property
    def cost_factors(self) -> tuple[float, float]:
        """What steps of decodes alone, and those with chunks of prompts, take beside what was predicted: what the
        choice of chunks corrects predictions by."""
        return self._core.cost_factors

    def ran_steps(self) -> list[ObservedStep]:
        """The steps that have come back since the last call, of many the last few thousand."""
        return self._core.ran_steps()

    def observe(self) -> Observation:
        """What the engine does now: the requests that run, where their KV lies, and how full its ranks are."""
        return self._core.observe()

    @property
    def still_s(self) -> float:
        """For how long no rank has got on, in the step that runs: the watchdog ends engines by it. From any thread."""
        return self._core.still_s

    def prefilled_tokens(self, request_id: int) -> int:
        """How many of a request's prompt tokens have been given to the ranks; 0 while it waits."""
        return self._core.prefilled_tokens(request_id)

    def step(self) -> list[Delta]:
        """Run until the oldest step in flight is done. Returns the deltas since the last call of requests that were
        added here.

        Raises EngineError if a rank failed, once it has returned what was there before; all other requests are over.
        """
        if self._core.has_failed and self._deltas:
            return self._given()
        self._advance()
        return self._given()

    def watch(self) -> None:
        """Look after the ranks while there is nothing to do. Raises EngineError if one of them has failed."""
        self._core.watch()

    @property
    def has_failed(self) -> bool:
        """Whether all requests are over, for a reason that was raised, until `restart`."""
        return self._core.has_failed

    def _given(self) -> list[Delta]:
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
        arrival_s = _arrived(arrival_s, time.monotonic())
        sampling = SamplingParams() if sampling is None else sampling
        self._core.check_asked(sampling, service)
        images: Sequence[ShownImage] = ()
        hashes: Sequence[bytes] = ()
        if isinstance(prompt, ImagePrompt | ReadPrompt):
            read = self._shown(prompt, context)
            given, images = read.token_ids, read.images
        elif context is None:
            given = self._token_ids(prompt)
        else:
            context = self._read(context, service)
            given, hashes = self._after(context, prompt, sampling)
        before = self._core.counters.exchanges.now
        request = self._core.request(given, sampling, service, arrival_s, images)
        tags = frozenset() if reasoning is None else reasoning.special_ids
        stream = self.tokenizer.stream(request.prompt_token_ids, sampling.skip_special_tokens, tags)
        unseen = [image.unseen() for image in images]
        stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        name = None if context is None else context.saved.name
        live = Live(request, stream, stops, deltas, before, name, unseen)
        live.reasoning = None if reasoning is None else ReasoningSplitter(reasoning)
        if not self._lost.take(live, self._live):
            self._core.queue(request, images, hashes)
            self._live[request.id] = live
        return request.id

    def _shown(self, prompt: ImagePrompt | ReadPrompt, context: object) -> ReadPrompt:
        if context is not None:
            raise UserError("a saved context has tokens alone, and no images go with it: leave out one of them")
        return prompt if isinstance(prompt, ReadPrompt) else self._images.read(prompt, self._token_ids)

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, ImagePrompt | ReadPrompt):
            raise UserError("a saved context has tokens alone: give its images with each prompt")
        if isinstance(prompt, str):  # a tokenizer may make a token of nothing, its BOS
            return self.tokenizer.encode(prompt) if prompt else []
        return prompt

    def _read(self, context: str | ReadContext, service: ServiceLevel) -> ReadContext:
        if not isinstance(context, ReadContext):
            return self._contexts.read(context, service.cache_salt)
        if context.cache_salt != service.cache_salt:
            raise UserError("the context was read with another cache_salt than its request has: give both the same one")
        return context

    def _after(
        self, context: ReadContext, prompt: Prompt, sampling: SamplingParams
    ) -> tuple[Sequence[int], Sequence[bytes]]:
        """Load a context into the ranks. Return its token ids followed by the prompt's, and the known block hashes."""
        more = self.tokenizer.encode_more(prompt) if isinstance(prompt, str) else prompt
        return self._contexts.before(context, more, sampling)

    def _next_delta(self, deltas: deque[Delta]) -> Delta:
        """The next delta of some requests, at least one of which has not ended. Deltas of other requests stay queued
        for them."""
        while not deltas:
            self._get_on()
        return deltas.popleft()

    def _get_on(self) -> None:
        """Advance, for a request that has not ended."""
        if not self._advance():
            raise EngineError("a request has not ended, but the engine has nothing to do: please report this")

    def _advance(self) -> bool:
        """Run until the oldest step in flight is done, and queue what each request got for whoever asked for it. Then
        get on with the contexts that are saved.

        Returns False if there is nothing to do.
        """
        self._core.check_running()
        try:
            while self._abandoned:
                self.abort(self._abandoned.popleft())
            for live in self._lost.go_on(self._core, self._contexts, self._live):
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
        for event in events:
            live = self._live.get(event.request_id)
            if live is not None and event.prompt_logprobs:
                live.prompt_logprobs += map(dict, event.prompt_logprobs)
            elif live is not None:
                live.deltas.append(self._delivered(event, now_s))
            else:  # whoever added it was interrupted before it was known here
                self._core.abort(event.request_id)

    def expert_load(self) -> list[list[int]] | None:
        """How many rows each expert has had since the engine started, by layer (empty for layers without experts) and
        expert. None for a model without experts. The ranks are asked when this is called; no step waits for it."""
        return self._core.expert_load()

    def sequence_parallel_report(self) -> dict[str, Any] | None:
        """What the compiler pass of `enable_sp` has made of the graphs so far of one rank of each pipeline stage; None
        without the pass. The ranks are asked when this is called.

        {"patterns": {name: matches}, "collectives": {"before": {kind: count}, "after": {}}, "bytes": {"before": {dtype:
        bytes that a rank sends}, "after": {}}, "left_alone": [why a collective stayed]}; docs/passes.md has the names.
        A graph for any number of tokens counts the bytes of as many as it was traced with."""
        return self._core.pass_report()

    def abort(self, request_id: int) -> Result | None:
        """End a request in any phase. Returns its result so far, which also ends its stream, or None if it had already
        ended."""
        usage = self._core.abort(request_id)
        live = self._live.pop(request_id, None)
        if live is None:
            live = self._lost.pop(request_id)
            usage = Usage((0,) * self.config.layout.kvp)
        if live is None or usage is None:
            return None
        result = self._result(live, "abort", usage)
        if live.deltas is self._deltas:  # whose results come from here
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
        """Run prompts together to their ends, each after the saved context of that name. Returns one result per prompt,
        in order. If one prompt is refused, all are."""
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
                ids.append(self._queue(prompt, sampling, service, deltas, context))
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
        """Run one prompt, after the saved context of that name, giving its text as it comes; the last delta has the
        result."""
        deltas: deque[Delta] = deque()
        request_id = self._queue(prompt, sampling, service, deltas, context)
        abandon = partial(self._abandoned.append, request_id)
        return Stream(partial(self._next_delta, deltas), partial(self.abort, request_id), abandon)

    def _delivered(self, event: TokenEvent, now_s: float) -> Delta:
        """What a token gives its request. What fails here fails this request alone."""
        live = self._live[event.request_id]
        if event.finish_reason == "error":
            assert event.sampled is not None
            return Delta(event.request_id, "", self._ended(live, "error", event.usage, event.sampled.error))
        result = reasoning = None
        try:
            text, reasoning, finish_reason = live.take(event, now_s)
        except Exception as error:
            usage = event.usage or self._core.abort(event.request_id)
            text, result = "", self._ended(live, "error", usage, f"{type(error).__name__}: {error}")
        else:
            live.text += text
            if finish_reason is not None:
                result = self._ended(live, finish_reason, event.usage or self._core.abort(event.request_id))
        if event.sampled is None:
            return Delta(event.request_id, text, result, reasoning=reasoning)
        found = Delta(event.request_id, text, result, event.sampled.token_id, reasoning=reasoning)
        if live.request.sampling.logprobs is None:
            return found
        return replace(found, logprobs=live.logprobs[-1], token_text=live.token_texts[-1])

    def _ended(self, live: Live, finish_reason: FinishReason, usage: Usage | None, error: str | None = None) -> Result:
        """The result of a request that is over."""
        del self._live[live.request.id]
        return self._result(live, finish_reason, usage, error)

    def _result(
        self,
        live: Live,
        finish_reason: FinishReason,
        usage: Usage | None,
        error: str | None = None,
    ) -> Result:
        layout, times_s, counters = self.config.layout, live.times_s, self._core.counters
        assert usage is not None, "it has ended, once"
        usage = usage if live.spent is None else usage.after(live.spent)
        return Result(
            text=live.text,
            token_ids=live.token_ids,
            prompt_tokens=len(live.request.prompt_token_ids),
            finish_reason=finish_reason,
            ttft_s=times_s[0] - live.request.arrival_s if times_s else None,
            tbt_s=[after - before for before, after in pairwise(times_s)],
            layout={"kvp": layout.kvp, "tpa": layout.tpa, "tpf": layout.tpf, "ep": layout.ep, "pp": layout.pp},
            kv_tokens_per_rank=list(usage.kv_tokens_per_rank),
            cached_tokens=usage.cached_tokens,
            preemptions=usage.preemptions,
            recomputed_tokens=usage.recomputed_tokens,
            swapped_tokens=usage.swapped_tokens,
            moved_tokens=usage.moved_tokens,
            moved_bytes=usage.moved_tokens * self.config.instance_kv_bytes_per_token,
            moved_s=usage.moved_s,
            exchanged_bytes_per_token=counters.exchanged_bytes / max(counters.rows, 1),
            hop_b=counters.exchanges.since(live.arrival),
            logprobs=live.logprobs if live.request.sampling.logprobs is not None else None,
            token_texts=live.token_texts if live.request.sampling.logprobs is not None else None,
            error=error,
            prompt_logprobs=live.prompt_logprobs if live.request.sampling.prompt_logprobs is not None else None,
            ending_token_id=None if live.ending is None else live.ending.token_id,
            ending_logprobs=dict(live.ending.logprobs)
            if live.ending is not None and live.request.sampling.logprobs is not None
            else None,
            reasoning=None if live.reasoning is None else live.reasoning.text,
            reasoning_tokens=None if live.reasoning is None else live.reasoning.num_tokens,
        )


def _with_ends(config: EngineConfig, end_ids: Sequence[int]) -> EngineConfig:
    """The configuration of a model whose answers these tokens end too."""
    spec = config.spec
    own = {token_id for token_id in end_ids if token_id < spec.vocab_size}.difference(spec.eos_token_ids)
    return replace(config, spec=replace(spec, eos_token_ids=(*spec.eos_token_ids, *sorted(own))))


def _arrived(asked_s: float | None, now_s: float) -> float:
    """When a request came. Raises UserError for what is no time up to now."""
    if asked_s is None:
        return now_s
    allowed = "a time of time.monotonic() that has been, or leave it out"
    return real("arrival_s", asked_s, lambda at_s: -math.inf < at_s <= now_s, allowed)


def _check_told(**told: object) -> None:
    """Raise UserError for what cannot be told the share that is done."""
    for name, each in told.items():
        if not callable(each):
            raise refused(name, each, "a function of one number")
