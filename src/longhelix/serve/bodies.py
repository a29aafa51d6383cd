"""What clients send: OpenAI's fields, vLLM's, and our own, each with its bounds. Fields that nobody knows pass; those
that others serve, and that change an answer, are refused unless they ask for what is done anyway."""

import json
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
from longhelix.guide import Guide
from longhelix.request import MAX_LOGPROBS, MOST_PRIORITY, MOST_TOKENS, SamplingParams, ServiceLevel

MOST_CHOICES, _MOST_PROMPTS, _MOST_MESSAGES, _MOST_PARTS = 64, 1024, 100_000, 10_000
_MOST_TOP_LOGPROBS = 20
_MOST_TOOLS = 128
_MOST_STOP_CHARACTERS = 2048  # of all stop strings: each new token is looked at for all of them
Strings = Annotated[list[str], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
ContextName = Annotated[str, AfterValidator(context_name)]
# Not served, by what asks for nothing.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "best_of": (1,),
    "guided_whitespace_pattern": (),
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
    "return_token_ids": (False,),
}
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


_GUIDED = ("json", "regex", "choice", "grammar")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class NamedSchema(Body):
    name: Annotated[str, Field(max_length=256)] | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """What OpenAI's answers are."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def guide(self) -> Guide | None:
        """Raises UserError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UserError("response_format has a json_schema where its type is json_schema, and nowhere else")
        if self.json_schema is not None:
            return Guide.of_schema(self.json_schema.content)
        return Guide("json") if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """What vLLM's answers are."""

    model_config = ConfigDict(strict=True, extra="forbid")
    content: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
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

    @property
    def guide_field(self) -> str | None:
        """The field that says what the answer has to be."""
        names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _GUIDED))
        return next((name for name in names if getattr(self, name) is not None), None)

    def guide(self) -> Guide | None:
        """What the answer has to be. Takes a while where that is long. Raises UserError for what nothing can be, and
        where two fields say it."""
        other = self.structured_outputs or StructuredOutputs()
        found = [
            Guide.of_schema(schema) for schema in (self.guided_json, other.content) if schema is not None
        ]  # fmt: skip
        found += [Guide("regex", regex) for regex in (self.guided_regex, other.regex) if regex is not None]
        found += [Guide.of_choices(choices) for choices in (self.guided_choice, other.choice) if choices is not None]
        found += [Guide("grammar", text) for text in (self.guided_grammar, other.grammar) if text is not None]
        found += [Guide("json")] if other.json_object else []
        asked = None if self.response_format is None else self.response_format.guide()
        found += [] if asked is None else [asked]
        if len(found) > 1:
            raise UserError(
                "several fields say what the answer has to be: give one of response_format, structured_outputs, "
                "guided_json, guided_regex, guided_choice and guided_grammar, and one thing in it"
            )
        return found[0] if found else None

    def sampling(self, max_new_tokens: int, choice: int, logprobs: int | None, guide: Guide | None) -> SamplingParams:
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
            guide=guide,
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


Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]  # of a function


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


class FunctionCall(Body):
    name: Name
    arguments: str | dict[str, Any]


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With its arguments as an object, which templates write as JSON. Raises UserError."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise UserError(f"messages have a call whose arguments are not JSON ({error}): correct it") from error
        if not isinstance(arguments, dict):
            raise UserError("messages have a call whose arguments are no JSON object: correct it")
        found = self.model_dump(exclude_none=True)
        return found | {"function": found["function"] | {"arguments": arguments}}


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: TextOr[Annotated[list[Part], Field(max_length=_MOST_PARTS, fail_fast=True)]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None

    @property
    def image_urls(self) -> list[str]:
        """Of the images that it shows, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: text in one piece, and where there are images, parts, with a place for each.
        Raises UserError."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = [part.text if isinstance(part, TextPart) else None for part in content]
            content = "".join(text for text in texts if text is not None) if None not in texts else _parts(texts)
        found = self.model_dump(exclude_none=True, exclude={"content"}) | {"content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found


Messages = Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]


def _parts(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """None: an image."""
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]


class Function(Body):
    """One that the model may call. parameters: a JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampled):
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two of the tools have one name: give each another one")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice wants a call, but there are no tools: give some, or leave it out")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice wants {self.tool_choice.function.name}, which is none of the tools")
        return self

    @property
    def offered(self) -> list[Function]:
        """The functions that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def wanted(self) -> list[Function]:
        """Those of which it has to call one; empty where it need not."""
        if isinstance(self.tool_choice, ToolChoice):
            return [function for function in self.offered if function.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

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

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}
                for name, other in (("prompt", "messages"), ("messages", "prompt"))
            ]
        }
    )

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
