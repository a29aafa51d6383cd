"""What clients send: OpenAI's fields, vLLM's, and our own, each with its bounds. Fields that nobody knows pass; those
that others serve, and that change an answer, are refused unless they ask for what is done anyway."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from longhelix.cache.context_folder import context_name
from longhelix.errors import UserError
from longhelix.request import MAX_LOGPROBS, MOST_PRIORITY, MOST_TOKENS, SamplingParams, ServiceLevel

MOST_CHOICES, _MOST_PROMPTS, _MOST_MESSAGES, _MOST_PARTS = 64, 1024, 100_000, 10_000
_MOST_TOP_LOGPROBS = 20
_MOST_STOP_CHARACTERS = 2048  # of all stop strings: each new token is looked at for all of them
Strings = Annotated[list[str], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
ContextName = Annotated[str, AfterValidator(context_name)]
# Not served, by what asks for nothing.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "best_of": (1,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class Sampled(Body):
    """What requests for new tokens have in common. A null is what is left out.

    prompt_field, limit_field: those that say what comes before new tokens, and how many of these may come. not_here:
    fields that are not served, by what asks for nothing; instead: what to do about some of them.
    """

    prompt_field: ClassVar[str]
    limit_field: ClassVar[str] = "max_tokens"
    not_here: ClassVar[Mapping[str, tuple[Any, ...]]] = _NOT_HERE
    instead: ClassVar[Mapping[str, str]] = {}

    model: Annotated[str, Field(max_length=4096)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Strings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    client: Annotated[str, Field(max_length=256)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    context: ContextName | None = None
    ttft_slo_s: Seconds | None = None
    tbt_slo_s: Seconds | None = None
    user: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = (self.model_extra or {}) | ({} if self.n is None else {"n": self.n})
        for name, value in given.items():
            if name in self.not_here and value is not None and value not in self.not_here[name]:
                raise ValueError(f"{name} is not served here: {self.instead.get(name, 'leave it out')}")
        stops = self.stop if isinstance(self.stop, list) else [self.stop or ""]
        if sum(map(len, stops)) > _MOST_STOP_CHARACTERS:
            raise ValueError(
                f"stop has more than {_MOST_STOP_CHARACTERS} characters in all: give fewer or shorter ones"
            )
        return self

    def asks_for(self, option: str) -> bool:
        """Whether this is a stream with that option."""
        return bool(self.stream and self.stream_options is not None and getattr(self.stream_options, option))

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def prompt_logprobs(self) -> int | None:
        return None

    def sampling(self, max_new_tokens: int, choice: int, logprobs: int | None) -> SamplingParams:
        """Of one of several choices, each of which has draws of its own. Raises UserError."""
        given = {
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": None if self.logit_bias is None else _biases(self.logit_bias),
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # as vLLM says that it is off
            "seed": None if self.seed is None else (self.seed + choice) % 2**63,
        }
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            **{name: value for name, value in given.items() if value is not None},
        )

    def service(self) -> ServiceLevel:
        """Raises UserError."""
        return ServiceLevel(
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            priority=self.priority or 0,
            client=self.client or "",
            cache_salt=self.cache_salt or "",
        )


def _prompts(given: object) -> list[str | list[int]]:
    """One prompt or several, of text or token ids. By hand: a union of lists has an error for each item of each."""
    prompts = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"there are {len(prompts)} prompts: give at most {_MOST_PROMPTS}")
    if len(set(map(type, prompts))) > 1:
        raise ValueError("prompts are all text, or all token ids")
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text(prompt)
        elif not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
            raise ValueError("give text, token ids, or a list of either, none of them empty")
        elif not 0 <= min(prompt) <= max(prompt) <= MOST_TOKENS:
            raise ValueError(f"token ids are whole numbers from 0 to {MOST_TOKENS}")
    if "" in prompts:
        raise ValueError("a prompt is empty: give at least one character")
    return prompts


def _prompt(given: object) -> str | list[int]:
    """One prompt. Likewise."""
    found = _prompts(given)
    if found != [given]:
        raise ValueError("give one prompt, of text or token ids")
    return found[0]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt has half a surrogate pair at character {error.start}") from error


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS}
_ONE_PROMPT_SCHEMA = {"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA]}
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, _SEVERAL | {"items": _TEXT_SCHEMA}, _SEVERAL | {"items": _IDS_SCHEMA}]
}


class CompletionBody(Sampled):
    prompt_field = "prompt"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None

    @property
    def prompt_logprobs(self) -> int | None:
        """Those of the prompt's tokens go with its echo. Raises UserError where they would have to come in a stream,
        whose prompt is there before they are."""
        if not self.echo or self.logprobs is None:
            return None
        if self.stream:
            raise UserError("echo with logprobs does not stream: leave out one of the three")
        if self.context is not None:
            raise UserError(
                "echo with logprobs is of a prompt that is computed here: leave out context, or one of them"
            )
        return self.logprobs

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be computed."""
        return bool(self.echo) and self.max_tokens == 0 and self.logprobs is None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """detail: images are shown as the model scales them, which is the highest."""

    url: str
    detail: Literal["auto", "high"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
_Items = TypeVar("_Items")
# Told apart before they are looked at, or what is wrong with one would be said of the other.
TextOr = Annotated[
    Annotated[str, Tag("str")] | Annotated[_Items, Tag("list")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "list"),
]


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: TextOr[Annotated[list[Part], Field(max_length=_MOST_PARTS, fail_fast=True)]] | None = None

    @property
    def image_urls(self) -> list[str]:
        """Of the images that it shows, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: text in one piece, and where there are images, parts, with a place for each."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = [part.text if isinstance(part, TextPart) else None for part in content]
            content = "".join(text for text in texts if text is not None) if None not in texts else _parts(texts)
        return self.model_dump(exclude_none=True, exclude={"content"}) | {"content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]


def _parts(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """None: an image."""
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]


class ChatBody(Sampled):
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_LOGPROBS)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# Likewise for responses, of which none is kept.
_NOT_IN_RESPONSES: dict[str, tuple[Any, ...]] = _NOT_HERE | {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "n": (1,),
    "top_logprobs": (0,),
    "echo": (False,),
}


_WHOLE = "no response is kept, so send the whole conversation as input"
_NOTHING_KEPT = {
    "store": "no response is kept, so set it to false",
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
}


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str


class InputImage(Body):
    """image_url: as in `ImageUrl`."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] | None = None


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class InputMessage(Body):
    """A message of before, or of now; what a response had as its output is one."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[Annotated[list[InputPart], Field(max_length=_MOST_PARTS, fail_fast=True)]]

    def as_message(self) -> Message:
        """As chats have it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return Message(role=role, content=self.content)
        return Message(role=role, content=[_chat_part(part) for part in self.content])


def _chat_part(part: InputText | InputImage) -> TextPart | ImagePart:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


class ResponseBody(Sampled):
    prompt_field, limit_field = "input", "max_output_tokens"
    not_here = _NOT_IN_RESPONSES
    instead = _NOTHING_KEPT

    input: TextOr[Annotated[list[InputMessage], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None

    def take_messages(self) -> list[Message]:
        """The conversation that is to be answered, which is not kept here."""
        told = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*told, Message(role="user", content=self.input)]
        messages = [each.as_message() for each in self.input]
        self.input.clear()
        return told + messages


class TokenizeBody(Body):
    """Text, or messages, as tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class ContextBody(Body):
    """A context to be saved. replace: also in place of the one that has its name."""

    id: ContextName
    model: Annotated[str, Field(max_length=4096)] | None = None
    prompt: Annotated[str | list[int], PlainValidator(_prompt), WithJsonSchema(_ONE_PROMPT_SCHEMA)] | None = None
    messages: Messages | None = None
    replace: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """By token id, which JSON has as text."""
    wrong = next((name for name in given if not _is_written_id(name)), None)
    if wrong is not None:
        raise UserError(f'logit_bias has {wrong[:20]!r}: its names are token ids, such as "42"')
    return {int(name): bias for name, bias in given.items()}


def _is_written_id(name: str) -> bool:
    """As there is one way to write it: "42", and not "042"."""
    return name.isascii() and name.isdigit() and len(name) < 12 and (name == "0" or name[0] != "0")
