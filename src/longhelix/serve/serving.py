"""State that all routes share, such as the engine, and the conversion of HTTP requests to engine requests."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from longhelix.engine.llm import LLM
from longhelix.engine.prompt import ImagePrompt, ReadPrompt
from longhelix.engine.text.reasoning import PARSERS, ReasoningForm
from longhelix.engine.text.text_too_long import TextTooLongError
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, ReasoningTags
from longhelix.scheduler.request import SamplingParams
from longhelix.serve.bodies import ChatBody, ContextBody, Message, ResponseBody, SampledBody, TokenizeBody
from longhelix.serve.calls import EngineCall, current
from longhelix.serve.driver import Driver, RequestGroup
from longhelix.serve.engine_request import EngineRequest
from longhelix.serve.errors import ClientError
from longhelix.serve.images import read_images
from longhelix.serve.json_reader import JsonReader
from longhelix.serve.memory_budget import MemoryBudget
from longhelix.serve.metrics import PREFIX, Metrics
from longhelix.serve.refusals import OverloadedError, ShuttingDownError
from longhelix.serve.server_log import ServerLog
from longhelix.serve.traces import Traces
from longhelix.serve.work_queue import WorkQueue
from longhelix.values import one_of

_MOST_GUIDES, _MOST_WITH_IMAGES = 64, 16  # requests that may wait for a guide, or for images
_TEXT_THREADS = 4
_LONG = 1 << 18  # characters or tokens. Longer texts are tokenized one at a time, because this takes much memory.
_ANSWERS_BYTES = 64 << 20  # limit for all texts and tokens that answers repeat from their requests
_FEW = 1 << 10  # tokens. Converting fewer tokens to text needs no memory reservation.
_PART = 1 << 16  # items of a list that are converted at a time, while other threads wait
_MOST_LOGPROBS = 2**22  # log-probabilities per answer. Each takes about 100 bytes, both in memory and as JSON.
_MOST_ECHOED = 2**20  # tokens per answer. A token may have 100 characters, and memory contains several copies.


@dataclass
class Serving:
    """The engine and all other state that the routes share.

    Raises:
        UserError: `metrics_prefix` or `reasoning_parser` is invalid.
    """

    llm: LLM
    driver: Driver
    model: str  # the model name that clients use
    created_s: int  # when the server started, on the wall clock
    is_draining: bool = False  # True if the server is shutting down
    metrics_prefix: str = PREFIX
    log: ServerLog = field(default_factory=ServerLog)
    traces: Traces | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # template variables; requests may override
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # the model's settings; requests may override
    reasoning_parser: str = "auto"  # one of `PARSERS`
    metrics: Metrics = field(init=False)
    # Queues for tokenization, with dedicated threads.
    _text_queue: WorkQueue = field(init=False)
    _long_text_queue: WorkQueue = field(init=False)
    # Encodes long answers on a dedicated thread. `answer_memory` limits their memory.
    long_answers: WorkQueue = field(init=False)
    answer_memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(_ANSWERS_BYTES), init=False)
    # Compiles guides on a dedicated thread, so that a slow guide delays only other guides.
    _guide_queue: WorkQueue = field(default_factory=lambda: WorkQueue("guides", _MOST_GUIDES), init=False)
    # Decodes the images of one request at a time, because decoded images are large.
    _image_queue: WorkQueue = field(default_factory=lambda: WorkQueue("images", _MOST_WITH_IMAGES), init=False)

    def __post_init__(self) -> None:
        self.reasoning_parser = one_of("reasoning_parser", self.reasoning_parser, PARSERS)
        most_calls = self.driver.most_requests + _TEXT_THREADS
        self._text_queue = WorkQueue("texts", most_calls, _TEXT_THREADS)
        self._long_text_queue = WorkQueue("long texts", most_calls)
        self.long_answers = WorkQueue("long answers", 2**31)  # `answer_memory` is the limit
        self.metrics = Metrics(self.driver, self.llm.config, self.model, self.metrics_prefix)
        driver = self.driver
        driver.restart_listener, driver.restarted_listener = self._on_restart, self._on_restarted
        driver.failure_listener = self._on_failure

    def _on_restart(self, reason: str) -> None:
        self.metrics.on_restart()
        self.log.write("restart", f"the engine has failed and is restarting: {reason}", reason=reason)

    def _on_restarted(self) -> None:
        self.log.write("restarted", "the engine runs again")

    def _on_failure(self, reason: str) -> None:
        self.log.write("failure", f"the engine has failed: {reason}", reason=reason)

    @property
    def call(self) -> EngineCall:
        """The HTTP request that the running task serves."""
        found = current()
        return EngineCall(self.metrics) if found is None else found

    @property
    def max_model_len(self) -> int:
        return self.llm.config.scheduler.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise ClientError if the name is not the name of this server's model. None is accepted."""
        if name is not None and name != self.model:
            raise ClientError(f"there is no model {name[:200]!r} here: use {self.model!r}", "model", "model_not_found")

    async def token_texts(self, given: str | Sequence[int]) -> list[str]:
        """Return the text that each token of a prompt adds. Raises OverloadedError."""
        tokenizer = self.llm.tokenizer
        texts = tokenizer.parts if isinstance(given, str) else tokenizer.token_texts
        return await self._queue(len(given)).run(texts, given)

    async def text(self, token_ids: "array[int]", field: str = "tokens", begins: bool = True) -> str:
        """Return the text of tokens, including special tokens, for the answer of the call.

        Args:
            token_ids: the tokens.
            field: request field that contains the tokens, for error messages.
            begins: whether the tokens start a text rather than continue one.

        Raises:
            ClientError: there are too many tokens, or an id is outside the vocabulary.
            OverloadedError: too many long answers are in progress.
        """
        most = max(_MOST_ECHOED, self.max_model_len)
        if len(token_ids) > most:
            raise ClientError(f"there are {len(token_ids)} tokens: give at most {most}", field)
        vocab_size = self.llm.config.spec.vocabulary.size
        if len(token_ids) and max(token_ids) >= vocab_size:
            beyond = next(each for each in token_ids if each >= vocab_size)
            raise ClientError(f"token {beyond} is outside the model's vocabulary of {vocab_size}", field)
        if len(token_ids) > _FEW:
            self.reserve(self.llm.tokenizer.most_characters(token_ids))
        return await self._queue(len(token_ids)).run(self.llm.tokenizer.spell, token_ids, begins)

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory for text that the answer repeats from its request, until the call has ended.

        Raises:
            OverloadedError: the answers of other calls leave too little memory.
        """
        self.call.cleanups.append(self.answer_memory.reserve(num_bytes))

    def _queue(self, length: int) -> WorkQueue:
        """Return the queue for a text of `length` characters or tokens."""
        return self._text_queue if length <= _LONG else self._long_text_queue

    async def guide(self, make: Callable[[], Guide | None], field: str | None) -> Guide | None:
        """Make and check a guide on a thread.

        Args:
            make: returns the guide, or None for an answer without a guide.
            field: request field that describes the guide, for error messages.

        Raises:
            ClientError: the guide is invalid, or no answer can follow it.
            OverloadedError: too many guides are waiting.
        """
        try:
            guide = await asyncio.to_thread(make)
            if guide is not None and not self.llm.knows_guide(guide):
                await self._guide_queue.run(self.llm.check_guide, guide)
        except UserError as error:
            raise ClientError(str(error), field, error.code) from error
        return guide

    @cached_property
    def _reasoning_form(self) -> ReasoningForm | None:
        return self.llm.tokenizer.reasoning_form(self.reasoning_parser)

    async def reasoning(self, body: ChatBody | ResponseBody, prompt: "array[int] | ReadPrompt") -> ReasoningTags | None:
        """Return the tags around the reasoning of the answer, or None if reasoning stays in the content."""
        form = self._reasoning_form
        if form is None or not body.separates:
            return None
        token_ids = prompt.token_ids if isinstance(prompt, ReadPrompt) else prompt
        find = self.llm.tokenizer.reasoning_tags
        return await asyncio.to_thread(find, form, token_ids, bool(body.continue_final_message))

    async def guide_after(self, reasoning: ReasoningTags | None, guide: Guide | None, field: str) -> Guide | None:
        """Return a guide that applies only after the reasoning. Raises the same errors as `guide`."""
        if guide is None or reasoning is None:
            return guide
        return await self.guide(lambda: replace(guide, reasoning=reasoning), field)

    @property
    def status(self) -> Literal["ok", "draining", "restarting", "failed"]:
        """State of the server."""
        if self.driver.failure:
            return "failed"
        if self.driver.restarting:
            return "restarting"
        return "draining" if self.is_draining else "ok"

    def check_open(self) -> None:
        """Check whether the server accepts a request of one token, before the body is read or tokenized.

        Raises:
            ShuttingDownError: the server is shutting down.
            OverloadedError, RestartingError, EngineError: see `Driver.check_room`.
        """
        if self.is_draining:
            raise ShuttingDownError
        self.driver.check_room([1])

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestGroup:
        """Submit the requests of one call to the engine: all of them or none of them.

        Raises:
            ShuttingDownError: the server is shutting down.
            OverloadedError, RestartingError, EngineError, UserError: see `RequestGroup.submit`.
        """
        if self.is_draining:
            raise ShuttingDownError
        call = self.call
        self.driver.check_room([request.num_tokens for request in requests])
        if requests[0].context is not None:
            requests = await asyncio.to_thread(self._with_context, requests)
        group = RequestGroup(self.driver, call)
        call.cleanups.append(group.end)  # the task may be cancelled before it iterates over the group
        await group.submit(requests)
        return group

    def _with_context(self, requests: Sequence[EngineRequest]) -> Sequence[EngineRequest]:
        """Read the saved context of the requests of one call. All of them have the same context."""
        name = requests[0].context
        assert isinstance(name, str)
        context = self.llm.read_context(name, requests[0].service.cache_salt)
        return [replace(request, context=context) for request in requests]

    async def prompts(
        self, given: "Sequence[str | array[int]]", encode: Callable[[str], list[int]]
    ) -> "list[array[int]]":
        """Return the token ids of each prompt as int32. Threads tokenize the texts.

        Raises:
            ClientError: a text is too long.
            OverloadedError: too many texts are waiting.
        """
        return [await self.token_ids(encode, one, "prompt") if isinstance(one, str) else one for one in given]

    async def token_ids(
        self,
        encode: Callable[..., list[int]],
        given: str | Sequence[Message],
        field: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]":
        """Return the token ids of a text or a conversation as int32. A thread does the tokenization.

        Args:
            encode: converts the text or the messages to token ids.
            given: the text or the messages.
            field: request field that contains the text or the messages, for error messages.
            tools: functions that the conversation offers.

        Raises:
            ClientError: the text is too long.
            UserError: the conversation is invalid.
            OverloadedError: too many texts are waiting.
        """
        length = len(given) if isinstance(given, str) else sum(message.num_characters for message in given)
        return await self._queue(length).run(self._encoded, encode, given, field, tools)

    def _encoded(
        self,
        encode: Callable[..., list[int]],
        given: str | Sequence[Message],
        field: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> "array[int]":
        reader = JsonReader()
        text_or_messages = (
            given
            if isinstance(given, str)
            else [message.for_template(f"{field}[{place}]", reader) for place, message in enumerate(given)]
        )
        try:
            return _packed(encode(text_or_messages) if tools is None else encode(text_or_messages, tools))
        except TextTooLongError as error:
            raise ClientError(str(error), field, error.code) from error

    async def token_ids_alone(
        self,
        body: TokenizeBody | ContextBody,
        encode: Callable[..., list[int]],
        encode_messages: Callable[..., list[int]],
        no_images: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]":
        """Return the token ids of a body that has either `prompt` or `messages`, as int32.

        Args:
            body: the request body.
            encode: converts text to token ids.
            encode_messages: converts messages to token ids.
            no_images: error message for messages with images.
            tools: functions that the conversation offers.

        Raises:
            ClientError: the body has both fields or neither field, or its messages contain images.
        """
        if (body.prompt is None) == (body.messages is None):
            raise ClientError("give either prompt or messages", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            (token_ids,) = await self.prompts([body.prompt], encode)
            return token_ids
        if any(message.image_urls for message in body.messages):
            raise ClientError(no_images, "messages")
        encode_messages = partial(encode_messages, **body.rendering(self.chat_template_kwargs))
        return await self.token_ids(encode_messages, body.messages, "messages", tools)

    async def conversation(
        self,
        body: SampledBody,
        messages: list[Message],
        rendering: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int] | ReadPrompt":
        """Render messages into a prompt with the chat template.

        This method releases the content of the messages, because an answer may take a long time and images are large.
        `BodyRoute` releases the text of the body.

        Args:
            body: the request body.
            messages: the conversation. The list is empty afterwards.
            rendering: arguments of the chat template.
            tools: functions that the conversation offers.

        Returns:
            Token ids as int32, or a prompt with images.

        Raises:
            UserError: the conversation is invalid for this model.
            OverloadedError: too many texts or images are waiting.
        """
        tokenizer, field, context = self.llm.tokenizer, body.prompt_field, body.context
        given, urls = messages.copy(), [url for message in messages for url in message.image_urls]
        messages.clear()
        if urls and self.llm.config.spec.vision is None:
            raise ClientError("the model does not take images: send text only", field, "unsupported_model")
        if urls and context is not None:
            raise ClientError(
                "a saved context cannot be combined with images: leave out context or the images", "context"
            )
        if tools is not None and context is not None:
            raise ClientError(
                "tools belong to the beginning of a conversation, which the context already holds: leave out context "
                "or tools",
                "context",
            )
        encode = tokenizer.encode_chat if context is None else tokenizer.encode_more_chat
        token_ids = await self.token_ids(partial(encode, **rendering), given, field, tools)
        given.clear()
        if not urls:
            return token_ids
        return await self._image_queue.run(self._read, token_ids, urls, field)

    def _read(self, token_ids: "array[int]", urls: list[str], field: str) -> ReadPrompt:
        # Refuse more images at half of the limit, because images that have already been read must still fit.
        if self.llm.image_bytes > self.llm.config.image_bytes // 2:
            raise OverloadedError(
                f"the images of waiting requests take {self.llm.image_bytes} bytes already: try again later"
            )
        return self.llm.read(ImagePrompt(token_ids, read_images(urls, field)))

    async def context_tokens(self, name: str | None) -> int:
        """Return the number of tokens of a saved context, or 0 for None. Raises UserError for an unknown context."""
        return 0 if name is None else (await asyncio.to_thread(self.llm.contexts_folder.manifest, name)).num_tokens

    def requests(
        self,
        body: SampledBody,
        prompts: "Sequence[array[int] | ReadPrompt]",
        most_tokens: int | None,
        logprobs: int | None,
        context_tokens: int = 0,
        guide: Guide | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> list[EngineRequest]:
        """Return the engine requests of a call: one request for each choice of each prompt, in order.

        Args:
            body: the request body.
            prompts: token ids or prompts with images.
            most_tokens: maximum number of new tokens of an answer; None for as many as fit in the model's context.
            logprobs: number of likeliest tokens at each new token; None for no log-probabilities.
            context_tokens: number of tokens of the saved context before each prompt.
            guide: guide of each answer.
            reasoning: tags around text that is returned separately from the content.

        Raises:
            UserError: a request can never run, or the answer would be too large.
        """
        if len(prompts) * body.choices > self.driver.most_requests:
            raise ClientError(
                f"{len(prompts)} prompts with n {body.choices} make {len(prompts) * body.choices} requests, but at "
                f"most {self.driver.most_requests} may wait: send fewer",
                body.prompt_field if body.choices == 1 else "n",
            )
        requests, service, arrival_s = [], body.service(), self.call.arrival_s
        wants_progress = body.asks_for("include_progress")
        samplings: dict[int, list[SamplingParams]] = {}
        scored, entries = 0, 0  # number of tokens with log-probabilities, and of log-probabilities
        for prompt in prompts:
            given = _num_tokens(prompt) + context_tokens
            left = self.max_model_len - given
            least = 1 if most_tokens is None else most_tokens
            if least > left:
                raise ClientError(
                    f"the prompt has {given} tokens and needs {given + least} with the answer, but the model's "
                    f"context length is {self.max_model_len}: shorten the prompt, or ask for fewer tokens",
                    body.prompt_field if left < 1 else body.limit_field,
                    "context_length_exceeded",
                )
            most_new = left if most_tokens is None else most_tokens
            for tokens, num_best in ((most_new, logprobs), (given, body.num_prompt_logprobs)):
                if num_best is not None:
                    scored += tokens
                    entries += tokens * (num_best + 1) * body.choices
            if most_new not in samplings:
                samplings[most_new] = [
                    body.sampling(most_new, choice, logprobs, guide, self.sampling_defaults)
                    for choice in range(body.choices)
                ]
            requests += [
                EngineRequest(
                    prompt=prompt,
                    num_tokens=given,
                    sampling=sampling,
                    service=service,
                    arrival_s=arrival_s,
                    wants_progress=wants_progress,
                    context=body.context,
                    reasoning=reasoning,
                )
                for sampling in samplings[most_new]
            ]
        if entries > _MOST_LOGPROBS:
            most = max(logprobs or 0, body.num_prompt_logprobs or 0) + 1
            raise ClientError(
                f"{scored} tokens with {most} log-probabilities each and n {body.choices} make {entries} "
                f"log-probabilities, but an answer has at most {_MOST_LOGPROBS}: ask for fewer tokens, fewer "
                "log-probabilities or fewer choices",
                "prompt_logprobs" if logprobs is None else "logprobs",
            )
        if body.echoes:
            _check_echo(sum(map(_num_tokens, prompts)), body.choices, max(_MOST_ECHOED, self.max_model_len))
        return requests


def _check_echo(num_tokens: int, choices: int, most: int) -> None:
    """Raise ClientError if an answer would echo more than `most` prompt tokens."""
    if num_tokens * choices > most:
        raise ClientError(
            f"echo with n {choices} would repeat {num_tokens * choices} prompt tokens, but an answer repeats at most "
            f"{most}: send fewer or shorter prompts, ask for fewer choices, or leave out echo",
            "echo",
        )


def _packed(token_ids: list[int]) -> "array[int]":
    """Convert token ids to int32 in parts, so that other threads can run in between."""
    found = array("i")
    for start in range(0, len(token_ids), _PART):
        found.fromlist(token_ids[start : start + _PART])
    return found


def _num_tokens(prompt: "array[int] | ReadPrompt") -> int:
    return len(prompt.token_ids if isinstance(prompt, ReadPrompt) else prompt)
