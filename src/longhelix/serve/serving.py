"""What all routes share: the engine, its model's name, and how requests are made of what clients send."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from longhelix.engine.llm import LLM
from longhelix.engine.prompt import ImagePrompt, ReadPrompt
from longhelix.engine.text.reasoning import PARSERS, ReasoningForm
from longhelix.engine.text.text_too_long import TextTooLongError
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, ReasoningTags
from longhelix.scheduler.request import SamplingParams
from longhelix.serve.asked import Asked
from longhelix.serve.bodies import ChatBody, ContextBody, Message, ResponseBody, Sampled, TokenizeBody
from longhelix.serve.calls import EngineCall, current
from longhelix.serve.driver import Answers, Driver
from longhelix.serve.errors import ClientError
from longhelix.serve.images import read_images
from longhelix.serve.journal import Journal
from longhelix.serve.json_reader import JsonReader
from longhelix.serve.line import Line
from longhelix.serve.metrics import PREFIX, Metrics
from longhelix.serve.refusals import OverloadedError, ShuttingDownError
from longhelix.serve.room import Room
from longhelix.serve.traces import Traces
from longhelix.values import one_of

_MOST_GUIDES, _MOST_WITH_IMAGES = 64, 16  # requests that wait for them
_TEXT_THREADS = 4
_LONG = 1 << 18  # characters or tokens. Longer texts are made into tokens one at a time, which takes much memory
_ANSWERS_BYTES = 64 << 20  # of texts and tokens that answers give back
_FEW = 1 << 10  # tokens or fewer have a short text
_PART = 1 << 16  # of a list, which other threads wait for
_MOST_LOGPROBS = 2**22  # of one answer: each takes some 100 bytes, here and as JSON
_MOST_ECHOED = 2**20  # tokens of one answer: one may be a hundred characters, and of those several copies are made


@dataclass
class Serving:
    """`model`: the name that clients know it by. created_s: when it started, by the wall clock. metrics_prefix: of the
    names of metrics. chat_template_kwargs: variables of the chat template that requests may replace. reasoning_parser:
    one of `PARSERS`. Raises UserError for a prefix or a parser that is none."""

    llm: LLM
    driver: Driver
    model: str
    created_s: int
    is_draining: bool = False
    metrics_prefix: str = PREFIX
    journal: Journal = field(default_factory=Journal)
    traces: Traces | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str = "auto"
    metrics: Metrics = field(init=False)
    # Texts become tokens, and tokens texts, on threads that nothing else waits for.
    _texts: Line = field(init=False)
    _long_texts: Line = field(init=False)
    # Long answers are made on a thread that no other answer waits for, and there is room for so much of them.
    long_answers: Line = field(init=False)
    room: Room = field(default_factory=lambda: Room(_ANSWERS_BYTES), init=False)
    # What is hard to compile keeps nothing waiting but other guides.
    _compiling: Line = field(default_factory=lambda: Line("guides", _MOST_GUIDES), init=False)
    # An image in memory is large, and the tower takes all cores.
    _looking: Line = field(default_factory=lambda: Line("images", _MOST_WITH_IMAGES), init=False)

    def __post_init__(self) -> None:
        self.reasoning_parser = one_of("reasoning_parser", self.reasoning_parser, PARSERS)
        most_calls = self.driver.most_requests + _TEXT_THREADS
        self._texts = Line("texts", most_calls, _TEXT_THREADS)
        self._long_texts = Line("long texts", most_calls)
        self.long_answers = Line("long answers", 2**31)  # each was already admitted by `room`
        self.metrics = Metrics(self.driver, self.llm.config, self.model, self.metrics_prefix)
        self.driver.on_restart, self.driver.on_failure = self._restarts, self._failed

    def _restarts(self, reason: str) -> None:
        self.metrics.restarted()
        self.journal.tell("restart", f"the engine has failed and starts again: {reason}", reason=reason)

    def _failed(self, reason: str) -> None:
        self.journal.tell("failure", f"the engine has failed: {reason}", reason=reason)

    @property
    def call(self) -> EngineCall:
        """The HTTP request that is being answered."""
        found = current()
        return EngineCall(self.metrics) if found is None else found

    @property
    def max_model_len(self) -> int:
        return self.llm.config.scheduler.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise ClientError for the name of another model."""
        if name is not None and name != self.model:
            raise ClientError(f"there is no model {name[:200]!r} here: use {self.model!r}", "model", "model_not_found")

    async def token_texts(self, given: str | Sequence[int]) -> list[str]:
        """What each token of a prompt adds to its text. Raises OverloadedError."""
        tokenizer = self.llm.tokenizer
        texts = tokenizer.parts if isinstance(given, str) else tokenizer.token_texts
        return await self._line(len(given)).run(texts, given)

    async def text(self, token_ids: "array[int]", field: str = "tokens", begins: bool = True) -> str:
        """The text of tokens, special ones included, which the call's answer gives back. begins: they do not come
        behind others. Raises ClientError for ids that are no tokens, OverloadedError."""
        most = max(_MOST_ECHOED, self.max_model_len)
        if len(token_ids) > most:
            raise ClientError(f"there are {len(token_ids)} tokens: give at most {most}", field)
        vocab_size = self.llm.config.spec.vocab_size
        if len(token_ids) and max(token_ids) >= vocab_size:
            beyond = next(each for each in token_ids if each >= vocab_size)
            raise ClientError(f"token {beyond} is outside the model's vocabulary of {vocab_size}", field)
        if len(token_ids) > _FEW:
            self.reserve(self.llm.tokenizer.most_characters(token_ids))
        return await self._line(len(token_ids)).run(self.llm.tokenizer.spell, token_ids, begins)

    def reserve(self, num_bytes: int) -> None:
        """Say that the call's answer gives back so much of what its client sent, until it has ended. Raises
        OverloadedError if the answers of others leave no room for it."""
        self.call.ends.append(self.room.take(num_bytes))

    def _line(self, length: int) -> Line:
        """Where a text of so many characters or tokens is read."""
        return self._texts if length <= _LONG else self._long_texts

    async def guide(self, make: Callable[[], Guide | None], field: str | None) -> Guide | None:
        """What an answer has to be, once it is known that it can be, found off the event loop. field: that says it.
        Raises ClientError for what nothing can be, and OverloadedError."""
        try:
            guide = await asyncio.to_thread(make)
            if guide is not None and not self.llm.knows_guide(guide):
                await self._compiling.run(self.llm.check_guide, guide)
        except UserError as error:
            raise ClientError(str(error), field, error.code) from error
        return guide

    @cached_property
    def _reasoning_form(self) -> ReasoningForm | None:
        return self.llm.tokenizer.reasoning_form(self.reasoning_parser)

    async def reasoning(self, body: ChatBody | ResponseBody, prompt: "array[int] | ReadPrompt") -> ReasoningTags | None:
        """The tags that the answer may have around its reasoning; None where that is not to be told apart."""
        form = self._reasoning_form
        if form is None or not body.separates:
            return None
        token_ids = prompt.token_ids if isinstance(prompt, ReadPrompt) else prompt
        find = self.llm.tokenizer.reasoning_tags
        return await asyncio.to_thread(find, form, token_ids, bool(body.continue_final_message))

    async def guide_after(self, reasoning: ReasoningTags | None, guide: Guide | None, field: str) -> Guide | None:
        """A guide for an answer that may begin with reasoning, which it does not describe. Raises as `guide` does."""
        if guide is None or reasoning is None:
            return guide
        return await self.guide(lambda: replace(guide, reasoning=reasoning), field)

    def check_open(self) -> None:
        """Raise what whoever asks is told while not even a request of one token is taken: ShuttingDownError, or what
        `Driver.check_room` raises. So that nothing is read and made of text in vain."""
        if self.is_draining:
            raise ShuttingDownError
        self.driver.check_room([1])

    async def ask(self, asked: Sequence[Asked]) -> Answers:
        """Have the engine take requests together: all of them, or none. Raises what `Answers.ask` does, or
        ShuttingDownError."""
        if self.is_draining:
            raise ShuttingDownError
        call = self.call
        self.driver.check_room([one.num_tokens for one in asked])
        if asked[0].context is not None:
            asked = await asyncio.to_thread(self._with_context, asked)
        answers = Answers(self.driver, call)
        call.ends.append(answers.end)  # one that is called off may leave them before anybody waits for them
        await answers.ask(asked)
        return answers

    def _with_context(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        """Read the saved context of the requests of one call, which all have the same one."""
        name = asked[0].context
        assert isinstance(name, str)
        context = self.llm.read_context(name, asked[0].service.cache_salt)
        return [replace(one, context=context) for one in asked]

    async def prompts(
        self, given: "Sequence[str | array[int]]", encode: Callable[[str], list[int]]
    ) -> "list[array[int]]":
        """Text or token ids as the engine takes them: int32, made off the event loop, and once for all choices. Raises
        ClientError, OverloadedError."""
        return [await self.token_ids(encode, one, "prompt") if isinstance(one, str) else one for one in given]

    async def token_ids(
        self,
        encode: Callable[..., list[int]],
        given: str | Sequence[Message],
        field: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]":
        """Return the ids of a text or a conversation as int32, tokenized off the event loop.

        field: the request field that holds it.
        tools: functions that the conversation offers.

        Raises ClientError for text that is too long, UserError for an invalid conversation, OverloadedError.
        """
        length = len(given) if isinstance(given, str) else sum(message.num_characters for message in given)
        return await self._line(length).run(self._encoded, encode, given, field, tools)

    def _encoded(
        self,
        encode: Callable[..., list[int]],
        given: str | Sequence[Message],
        field: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> "array[int]":
        reader = JsonReader()
        told = (
            given
            if isinstance(given, str)
            else [message.for_template(f"{field}[{place}]", reader) for place, message in enumerate(given)]
        )
        try:
            return _packed(encode(told) if tools is None else encode(told, tools))
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
        """What the text, the token ids or the messages of a body are, one of which it has. no_images: what messages
        with some are told. Raises ClientError."""
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
        body: Sampled,
        messages: list[Message],
        rendering: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int] | ReadPrompt":
        """What the chat template makes of messages, behind a saved context if there is one, with the images that they
        show and the tools that they may call. rendering: arguments of the template. The messages' content is not kept:
        an answer may take long, and images are large (`BodyRoute` lets go of the text that they came in).
        Raises UserError for what cannot be, OverloadedError."""
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
        return await self._looking.run(self._read, token_ids, urls, field)

    def _read(self, token_ids: "array[int]", urls: list[str], field: str) -> ReadPrompt:
        # Of half of it none is taken, which leaves room for those that have been read and are on their way.
        if self.llm.image_bytes > self.llm.config.image_bytes // 2:
            raise OverloadedError(
                f"the images of waiting requests take {self.llm.image_bytes} bytes already: try again later"
            )
        return self.llm.read(ImagePrompt(token_ids, read_images(urls, field)))

    async def context_tokens(self, name: str | None) -> int:
        """Of the saved context that prompts go on after. Raises UserError for one that is not there."""
        return 0 if name is None else (await asyncio.to_thread(self.llm.contexts_folder.manifest, name)).num_tokens

    def requests(
        self,
        body: Sampled,
        prompts: "Sequence[array[int] | ReadPrompt]",
        most_tokens: int | None,
        logprobs: int | None,
        context_tokens: int = 0,
        guide: Guide | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> list[Asked]:
        """One for each choice of each prompt, in order. most_tokens: of an answer; None: what the context leaves.
        context_tokens: of the saved context before each prompt. guide: what each answer has to be. reasoning: tags
        whose text is kept apart. Raises UserError for what can never run."""
        if len(prompts) * body.choices > self.driver.most_requests:
            raise ClientError(
                f"{len(prompts)} prompts and n {body.choices} are {len(prompts) * body.choices} requests, but "
                f"{self.driver.most_requests} may wait here: send fewer",
                body.prompt_field if body.choices == 1 else "n",
            )
        asked, watched, service, came_s = [], body.asks_for("include_progress"), body.service(), self.call.came_s
        samplings: dict[int, list[SamplingParams]] = {}
        scored, entries = 0, 0  # tokens that have log-probabilities, and these
        for prompt in prompts:
            given = _num_tokens(prompt) + context_tokens
            left = self.max_model_len - given
            least = 1 if most_tokens is None else most_tokens
            if least > left:
                raise ClientError(
                    f"the prompt has {given} tokens, and with the answer's there may be {given + least}, but the "
                    f"model's context has {self.max_model_len}: shorten the prompt, or ask for fewer tokens",
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
                    body.sampling(most_new, choice, logprobs, guide) for choice in range(body.choices)
                ]
            asked += [
                Asked(prompt, given, sampling, service, came_s, watched, body.context, reasoning)
                for sampling in samplings[most_new]
            ]
        if entries > _MOST_LOGPROBS:
            most = max(logprobs or 0, body.num_prompt_logprobs or 0) + 1
            raise ClientError(
                f"{scored} tokens with {most} log-probabilities each and n {body.choices} may be "
                f"{entries} of them, and an answer has at most {_MOST_LOGPROBS}: ask for fewer tokens, fewer "
                "log-probabilities or fewer choices",
                "prompt_logprobs" if logprobs is None else "logprobs",
            )
        if body.echoes:
            _check_echo(sum(map(_num_tokens, prompts)), body.choices, max(_MOST_ECHOED, self.max_model_len))
        return asked


def _check_echo(num_tokens: int, choices: int, most: int) -> None:
    """Raise ClientError where more than `most` tokens of prompts would go back. One prompt alone may be of any
    length."""
    if num_tokens * choices > most:
        raise ClientError(
            f"{num_tokens} tokens of prompts and n {choices} are {num_tokens * choices} that echo gives back, and an "
            f"answer has at most {most} of them: send fewer or shorter prompts, ask for fewer choices, or leave out "
            "echo",
            "echo",
        )


def _packed(token_ids: list[int]) -> "array[int]":
    found = array("i")
    for start in range(0, len(token_ids), _PART):
        found.fromlist(token_ids[start : start + _PART])
    return found


def _num_tokens(prompt: "array[int] | ReadPrompt") -> int:
    return len(prompt.token_ids if isinstance(prompt, ReadPrompt) else prompt)
