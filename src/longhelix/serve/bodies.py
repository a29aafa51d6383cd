"""What clients send: OpenAI's fields, vLLM's, and our own, each with its bounds. Fields that nobody knows pass; those
that others serve, and that change an answer, are refused unless they ask for what is done anyway."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from longhelix.errors import UserError
from longhelix.request import MAX_LOGPROBS, MOST_PRIORITY, MOST_TOKENS, SamplingParams, ServiceLevel

MOST_CHOICES, _MOST_PROMPTS, _MOST_MESSAGES, _MOST_PARTS = 64, 1024, 100_000, 10_000
_MOST_TOP_LOGPROBS = 20
_MOST_STOP_CHARACTERS = 2048  # of all stop strings: each new token is looked at for all of them
Strings = Annotated[list[str], Field(max_length=64, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
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
    "context": (),
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
    """What requests for new tokens have in common. A null is what is left out."""

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
    ttft_slo_s: Seconds | None = None
    tbt_slo_s: Seconds | None = None
    user: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_HERE and value is not None and value not in _NOT_HERE[name]:
                raise ValueError(f"{name} is not served here: leave it out")
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


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt has half a surrogate pair at character {error.start}") from error


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS}
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, _SEVERAL | {"items": _TEXT_SCHEMA}, _SEVERAL | {"items": _IDS_SCHEMA}]
}


class CompletionBody(Sampled):
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
        return self.logprobs


class Part(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(max_length=_MOST_PARTS, fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: text in one piece."""
        content = self.content or ""
        return self.model_dump(exclude_none=True) | {
            "content": content if isinstance(content, str) else "".join(part.text for part in content)
        }


class ChatBody(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
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


class TokenizeBody(Body):
    """Text, or messages, as tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """By token id, which JSON has as text."""
    wrong = next((name for name in given if not (name.isascii() and name.isdigit() and len(name) < 12)), None)
    if wrong is not None:
        raise UserError(f'logit_bias has {wrong!r}: its names are token ids, such as "42"')
    return {int(name): bias for name, bias in given.items()}
