"""What requests for new tokens have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import MAX_LOGPROBS, MOST_PRIORITY, MOST_TOKENS, SamplingParams, ServiceLevel
from longhelix.serve.bodies.body import Body, ContextName, ModelName, TokenId, few
from longhelix.serve.bodies.guided import Guided
from longhelix.serve.bodies.unserved import UNSERVED, Unserved, check_unserved

_MOST_CHOICES = 64
_MOST_STOP_CHARACTERS = 2048  # of all stop strings: each new token is looked at for all of them
_MOST_BIASED = 1024
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Strings = Annotated[list[str], Field(max_length=64, fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class Sampled(Guided):
    """What requests for new tokens have in common. A null is what is left out.

    prompt_field, limit_field: those that say what comes before new tokens, and how many of these may come.
    unserved: fields of other servers that are refused.
    """

    prompt_field: ClassVar[str]
    limit_field: ClassVar[str] = "max_tokens"
    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED

    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=_MOST_BIASED), few(_MOST_BIASED)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | _Strings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    client: Annotated[str, Field(max_length=256)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    context: ContextName | None = None
    ttft_slo_s: _Seconds | None = None
    tbt_slo_s: _Seconds | None = None
    user: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, self.unserved)
        if self.context is not None and self.cache_salt:  # or each new salt would have all of the context loaded again
            raise ValueError(
                "cache_salt keeps KV private, but a saved context is shared: leave out cache_salt or context"
            )
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
    def num_prompt_logprobs(self) -> int | None:
        """Of each token of the prompt; None where none are wanted."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each choice begins with its prompt."""
        return False

    def sampling(self, max_new_tokens: int, choice: int, logprobs: int | None, guide: Guide | None) -> SamplingParams:
        """Of one of several choices, each of which has draws of its own. The first one has the log-probabilities of
        their prompt for all. Raises UserError."""
        given = {
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": None if self.logit_bias is None else _biases(self.logit_bias),
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # as vLLM says that it is off
            "seed": None if self.seed is None else (self.seed + choice) % 2**63,
        }
        # Without new tokens a request is there for these alone.
        others = 0 if max_new_tokens == 0 and self.num_prompt_logprobs is not None else None
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            logprobs=logprobs,
            prompt_logprobs=self.num_prompt_logprobs if choice == 0 else others,
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


class ScoredBody(Sampled):
    """Requests whose prompts may have log-probabilities, as vLLM has them."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None:
            self.check_scored("prompt_logprobs")
        return self.prompt_logprobs

    def check_scored(self, what: str) -> None:
        """Raise UserError where log-probabilities of a prompt cannot come: before its stream, or without computing
        it."""
        if self.stream:
            raise UserError(f"{what} cannot be streamed: leave out stream, or {what}")
        if self.context is not None:
            raise UserError(f"{what} needs a prompt that is computed here: leave out context, or {what}")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """By token id, which JSON has as text."""
    wrong = next((name for name in given if not _is_written_id(name)), None)
    if wrong is not None:
        raise UserError(f'logit_bias has {wrong[:20]!r}: its keys must be token ids, such as "42"')
    return {int(name): bias for name, bias in given.items()}


def _is_written_id(name: str) -> bool:
    """As there is one way to write it: "42", and not "042"."""
    return name.isascii() and name.isdigit() and len(name) < 12 and (name == "0" or name[0] != "0")
