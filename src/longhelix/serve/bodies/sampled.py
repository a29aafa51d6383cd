"""Request fields of all endpoints that generate tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import MAX_LOGPROBS, MOST_PRIORITY, MOST_TOKENS, SamplingParams, ServiceLevel
from longhelix.serve.bodies.body import Body, ContextName, ModelName, TokenId, few
from longhelix.serve.bodies.guided import GuidedBody
from longhelix.serve.bodies.unserved import UNSERVED, Unserved, check_unserved

_MOST_CHOICES = 64
_MOST_STOP_CHARACTERS = 2048  # total over all stop strings, because each new token is checked against all of them
_MOST_BIASED = 1024
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Strings = Annotated[list[str], Field(max_length=64, fail_fast=True)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the token counts in the last event."""
    continuous_usage_stats: bool | None = None
    """Send the token counts in every event."""
    include_progress: bool | None = None
    """Send `progress` events while the prompt is processed."""


class SampledBody(GuidedBody):
    """Fields of all endpoints that generate tokens. A field that is null has its default value."""

    prompt_field: ClassVar[str]  # name of the field that contains the prompt
    limit_field: ClassVar[str] = "max_tokens"  # name of the field with the maximum number of new tokens
    unserved: ClassVar[Mapping[str, Unserved]] = UNSERVED  # unsupported fields of other servers

    model: ModelName | None = None
    """Name of the model; by default, the model of this server."""
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    """Number of answers to each prompt; 1 by default."""
    stream: bool | None = None
    """Send the answer as server-sent events; false by default."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    temperature: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] | None = None
    """Sampling temperature. At 0, the likeliest token is always chosen. By default the model's own setting, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample only from the likeliest tokens, up to a total probability of top_p. By default the model's setting."""
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    """Sample only from the top_k likeliest tokens; -1 or 0 for all tokens. By default the model's setting."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample only from tokens that have at least min_p times the probability of the likeliest token."""
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Values above 1 make tokens that occur in the prompt or the answer less likely."""
    presence_penalty: _Penalty | None = None
    """Value to subtract from the logit of each token that occurs in the answer."""
    frequency_penalty: _Penalty | None = None
    """Value to subtract from a token's logit for each occurrence of the token in the answer."""
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=_MOST_BIASED), few(_MOST_BIASED)] | None = None
    """Values to add to the logits, by token id."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Random seed that makes sampling reproducible. The n answers to a prompt use consecutive seeds."""
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | _Strings | None = None
    """One or more texts that end the answer."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    """Ids of tokens that end the answer."""
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    """Minimum number of new tokens before an end token or a stop string may end the answer."""
    ignore_eos: bool | None = None
    """Continue the answer after the model's end tokens."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; true by default."""
    include_stop_str_in_output: bool | None = None
    """Keep the text that ended the answer; false by default."""
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    """Requests with a higher priority run first; 0 by default."""
    client: Annotated[str, Field(max_length=256)] | None = None
    """Name of the client. The scheduler divides prefill time fairly among clients."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Share the prefix cache only with requests that have the same salt."""
    context: ContextName | None = None
    """Saved context that the prompt continues."""
    ttft_slo_s: _Seconds | None = None
    """Target for the time to the first token, in seconds."""
    tbt_slo_s: _Seconds | None = None
    """Target for the time between two tokens, in seconds."""
    user: Any = None
    """Accepted, but has no effect."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, self.unserved)
        if self.context is not None and self.cache_salt:  # otherwise each new salt would load the whole context again
            raise ValueError(
                "cache_salt keeps KV private, but a saved context is shared: leave out cache_salt or context"
            )
        stops = self.stop if isinstance(self.stop, list) else [self.stop or ""]
        if sum(map(len, stops)) > _MOST_STOP_CHARACTERS:
            raise ValueError(
                f"stop has more than {_MOST_STOP_CHARACTERS} characters in total: give fewer or shorter strings"
            )
        return self

    def asks_for(self, option: str) -> bool:
        """True if the answer is a stream and this option of `stream_options` is set."""
        return bool(self.stream and self.stream_options is not None and getattr(self.stream_options, option))

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens at each prompt token; None for no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """True if each choice begins with its prompt."""
        return False

    def sampling(
        self,
        max_new_tokens: int,
        choice: int,
        logprobs: int | None,
        guide: Guide | None,
        defaults: Mapping[str, Any],
    ) -> SamplingParams:
        """Return the sampling parameters of one choice.

        Each choice has its own seed. Only the first choice computes the log-probabilities of the prompt.

        Args:
            max_new_tokens: maximum number of new tokens.
            choice: index of the choice.
            logprobs: number of likeliest tokens at each new token; None for no log-probabilities.
            guide: guide of the answer.
            defaults: the model's sampling settings, for fields that the request leaves out.

        Raises:
            UserError: a value is invalid.
        """
        given = {
            "temperature": self.temperature,
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
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1 is vLLM's value for no limit
            "seed": None if self.seed is None else (self.seed + choice) % 2**63,
        }
        # A request must compute something. If it has no new tokens, it computes the log-probabilities of its prompt.
        others = 0 if max_new_tokens == 0 and self.num_prompt_logprobs is not None else None
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.num_prompt_logprobs if choice == 0 else others,
            guide=guide,
            **{"temperature": 1.0, **defaults, **{name: each for name, each in given.items() if each is not None}},
        )

    def service(self) -> ServiceLevel:
        """Return the service level. Raises UserError for an invalid value."""
        return ServiceLevel(
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            priority=self.priority or 0,
            client=self.client or "",
            cache_salt=self.cache_salt or "",
        )


class ScoredBody(SampledBody):
    """Fields of endpoints that can return log-probabilities of the prompt, as vLLM does."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of likeliest tokens to return for each prompt token, with their log-probabilities."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None:
            self.check_scored("prompt_logprobs")
        return self.prompt_logprobs

    def check_scored(self, what: str) -> None:
        """Raise UserError if log-probabilities of the prompt are impossible: in a stream, or after a saved context."""
        if self.stream:
            raise UserError(f"{what} cannot be streamed: leave out stream, or {what}")
        if self.context is not None:
            raise UserError(f"{what} cannot be combined with a saved context: leave out context, or {what}")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id. In JSON, the ids are strings."""
    wrong = next((name for name in given if not _is_written_id(name)), None)
    if wrong is not None:
        raise UserError(f'logit_bias key {wrong[:20]!r} is not a token id: use keys such as "42"')
    return {int(name): bias for name, bias in given.items()}


def _is_written_id(name: str) -> bool:
    """True if a string is a token id in its canonical form, such as "42" but not "042"."""
    return name.isascii() and name.isdigit() and len(name) < 12 and (name == "0" or name[0] != "0")
