"""Requests: the prompt, how new tokens are sampled, and the service level asked of the scheduler."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.values import entries, flag, items, real, refused, seconds, text, whole

MAX_LOGPROBS = 100
MOST_TOKENS = 2**31 - 1  # token ids and lengths travel in 32 bits
_MOST_STOPS, _LONGEST_STOP = 64, 1000  # strings, characters; every new token is searched for all of them
_MOST_STOP_IDS = 1024
# Below this range, differences between logits overflow float32, and sampling is greedy in effect. Above it, the
# differences vanish, and all tokens become equally likely. The same holds for the repetition penalty.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
_MOST_PENALTY = 1e6
_MOST_BIASED = 1024  # token ids
_MOST_BIAS, _MOST_SUBTRACTED = 100, 2  # added to logits; the limits of OpenAI's API
MOST_PRIORITY = 1_000_000
_LONGEST_NAME = 256  # characters


@dataclass(frozen=True)
class SamplingParams:
    """How to sample the new tokens of one request.

    Logits are changed in this order: logit_bias, presence_penalty and frequency_penalty, repetition_penalty,
    temperature, then the filters top_k, top_p and min_p. The defaults switch all of them off.

    Attributes:
        max_new_tokens: Maximum number of new tokens. May be 0 if prompt_logprobs is set.
        temperature: Divides the logits. 0 always takes the most likely token (greedy).
        top_k: Sample from the k most likely tokens. 0 is off.
        top_p: Sample from the most likely tokens that together reach this probability. 1 is off.
        min_p: Drop tokens less likely than this fraction of the most likely token. 0 is off.
        repetition_penalty: Above 1, makes tokens of the prompt and the answer less likely. 1 is off.
        presence_penalty: Subtracted from the logits of every token that the answer already has. 0 is off.
        frequency_penalty: Subtracted from a token's logit once for each time the answer has it. 0 is off.
        logit_bias: Numbers to add to logits, by token id.
        seed: Seed of the random draws. Equal seeds give equal tokens in any batch. None draws a seed at random.
        stop: Strings that end the answer. The text ends before the string.
        stop_token_ids: Token ids that end the answer, in addition to the model's end-of-sequence tokens.
        ignore_eos: Continue after an end-of-sequence token.
        min_tokens: Minimum number of new tokens before an end-of-sequence token or a stop may end the answer.
        logprobs: Number of most likely tokens to report for each new token, before logits are changed. None is off.
        prompt_logprobs: The same for each prompt token. The whole prompt is computed, even if it is cached.
        guide: Restricts the text, for example to JSON. Its end ends the answer, even before min_tokens.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, that ended the answer.
        max_tokens: vLLM's name for max_new_tokens, for the constructor only. Always None afterwards.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check every value and convert it to a plain Python type. Raises UserError if one is invalid."""
        least, note = (1, " (0 needs prompt_logprobs)") if self.prompt_logprobs is None else (0, "")
        max_new_tokens = whole("max_new_tokens", self.max_new_tokens, least, MOST_TOKENS, note)
        if self.max_tokens is not None:
            max_tokens = whole("max_tokens", self.max_tokens, least, MOST_TOKENS, note)
            if max_new_tokens not in (SamplingParams.max_new_tokens, max_tokens):
                raise UserError("max_tokens and max_new_tokens are the same setting: leave one of them out")
            max_new_tokens = max_tokens
            object.__setattr__(self, "max_tokens", None)
        checked = {
            "max_new_tokens": max_new_tokens,
            "temperature": real(
                "temperature",
                self.temperature,
                lambda value: value == 0 or _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE,
                f"0 (greedy), or a number from {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE}",
            ),
            "top_k": whole("top_k", self.top_k, 0, MOST_TOKENS, " (0 is off)"),
            "top_p": real(
                "top_p", self.top_p, lambda value: 0 < value <= 1, "a number above 0 and at most 1 (1 is off)"
            ),
            "min_p": real("min_p", self.min_p, lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
            "repetition_penalty": real(
                "repetition_penalty",
                self.repetition_penalty,
                lambda value: 1 / _MOST_PENALTY <= value <= _MOST_PENALTY,
                f"a number from {1 / _MOST_PENALTY} to {_MOST_PENALTY} (1 is off)",
            ),
            "presence_penalty": _subtracted("presence_penalty", self.presence_penalty),
            "frequency_penalty": _subtracted("frequency_penalty", self.frequency_penalty),
            "logit_bias": _logit_bias(self.logit_bias),
            "seed": None if self.seed is None else whole("seed", self.seed, 0, 2**63 - 1),
            "stop": tuple(_stop_string(string) for string in items("stop", self.stop, _MOST_STOPS, "strings")),
            "stop_token_ids": tuple(
                whole("a stop token id", token_id, 0, MOST_TOKENS)
                for token_id in items("stop_token_ids", self.stop_token_ids, _MOST_STOP_IDS, "token ids")
            ),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "min_tokens": whole("min_tokens", self.min_tokens, 0, max_new_tokens, " (max_new_tokens)"),
            "logprobs": None if self.logprobs is None else whole("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "guide": _guide(self.guide),
            "skip_special_tokens": flag("skip_special_tokens", self.skip_special_tokens),
            "include_stop_str_in_output": flag("include_stop_str_in_output", self.include_stop_str_in_output),
        }
        if checked["guide"] is not None and checked["ignore_eos"]:
            raise UserError(
                "ignore_eos cannot be combined with a guide, which ends the text: leave out ignore_eos or the guide"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def most_sampled(self) -> int:
        """Maximum number of tokens to sample. A request for 0 new tokens samples one, which is dropped."""
        return max(self.max_new_tokens, 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether sampling needs the number of times that the request has generated each token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_generated(self) -> bool:
        """Whether sampling needs the tokens that the request has generated, in addition to the logits."""
        return self.counts_tokens or self.guide is not None


def _guide(value: object) -> Guide | None:
    if value is None or isinstance(value, Guide):
        return value
    raise refused("guide", value, 'a Guide, such as Guide("json"), or None')


def _subtracted(name: str, value: object) -> float:
    most = _MOST_SUBTRACTED
    return real(name, value, lambda number: -most <= number <= most, f"a number from {-most} to {most} (0 is off)")


def _logit_bias(value: object) -> dict[int, float]:
    allowed = f"a number from {-_MOST_BIAS} to {_MOST_BIAS}"
    biases: dict[int, float] = {}
    for key, bias in entries("logit_bias", value, _MOST_BIASED, "token ids to numbers"):
        token_id = whole("a token id of logit_bias", key, 0, MOST_TOKENS)
        biases[token_id] = real(
            f"the logit bias of token {token_id}", bias, lambda number: abs(number) <= _MOST_BIAS, allowed
        )
    return biases


def _stop_string(value: object) -> str:
    string = text("a stop string", value)
    if not string:
        raise UserError("a stop string is empty: give at least one character")
    if len(string) > _LONGEST_STOP:
        raise UserError(f"a stop string has {len(string)} characters: give at most {_LONGEST_STOP}")
    return string


@dataclass(frozen=True)
class ServiceLevel:
    """What one request asks of the scheduler.

    Attributes:
        ttft_slo_s: Target time to the first token, in seconds. By default derived from the predicted prefill time.
        tbt_slo_s: Target for the longest time between two tokens, in seconds. By default the engine's target alone.
        priority: Requests of higher priority are scheduled first under every policy.
        client: Name of the client. Clients share prefill time equally, or by weight, while they compete.
        cache_salt: The request shares cached KV only with requests that have the same salt.
        growth_limit_tokens: Tokens that one KVP rank holds before the next rank joins, rounded down to KV blocks.
    """

    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    growth_limit_tokens: int | None = None

    @property
    def has_slo(self) -> bool:
        return self.ttft_slo_s is not None or self.tbt_slo_s is not None

    def __post_init__(self) -> None:
        """Check every value and convert it to a plain Python type. Raises UserError if one is invalid."""
        checked: dict[str, Any] = {
            "ttft_slo_s": None if self.ttft_slo_s is None else seconds("ttft_slo", self.ttft_slo_s),
            "tbt_slo_s": None if self.tbt_slo_s is None else seconds("tbt_slo", self.tbt_slo_s),
            "priority": whole("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY),
            "client": _name("client", self.client),
            "cache_salt": _name("cache_salt", self.cache_salt),
            "growth_limit_tokens": None
            if self.growth_limit_tokens is None
            else whole("growth_limit_tokens", self.growth_limit_tokens, 1, MOST_TOKENS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _name(name: str, value: object) -> str:
    string = text(name, value)
    if len(string) > _LONGEST_NAME:
        raise UserError(f"{name} has {len(string)} characters: give at most {_LONGEST_NAME}")
    return string


ANY_SERVICE = ServiceLevel()


class TokenIds(Protocol):
    """Sliceable sequence of int32 token ids: an array, or an object that makes the ids when they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "array[int]": ...

    def __add__(self, more: "array[int]", /) -> "TokenIds": ...


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The prompt tokens that stand for one image: the cells of a grid, row by row."""

    start: int  # index of the first token in the prompt
    rows: int
    columns: int
    digest: bytes  # SHA-256 of the grid's size and the pixels

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def shift(self) -> int:
        """Offset to add to the positions of the tokens after the image."""
        return max(self.rows, self.columns) - self.num_tokens


@dataclass(frozen=True)
class Request:
    """One prompt, with how to sample its answer and when it arrived."""

    id: int  # counted from 0 by the engine
    prompt_token_ids: TokenIds  # as the user gave them, followed by tokens that the request has generated
    sampling: SamplingParams  # as the user gave it. `resumed` reduces its numbers of tokens
    stop_token_ids: frozenset[int]  # token ids that end the answer, end-of-sequence tokens included
    seed: int  # sampling.seed, or a number drawn when the request was added
    arrival_s: float  # in seconds, on the engine's clock
    service: ServiceLevel = ANY_SERVICE  # client, priority and deadlines
    num_generated: int = 0  # last tokens of the prompt that the request generated before it was preempted
    images: tuple[ImageSpan, ...] = ()  # in the order of the prompt
    guide_s: float = 0.0  # seconds that a rank takes to compile the guide

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens: those of the prompt and the new ones."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens

    @property
    def num_rows(self) -> int:
        """Maximum number of tokens that have KV. The last new token has none."""
        return len(self.prompt_token_ids) + self.sampling.most_sampled - 1

    @property
    def given_tokens(self) -> int:
        """Number of prompt tokens that the user gave."""
        return len(self.prompt_token_ids) - self.num_generated

    @property
    def generated_token_ids(self) -> bytes:
        """Generated ids as int32 bytes, for `KnownTokens`; empty if sampling does not need them."""
        if not (self.num_generated and self.sampling.needs_generated):
            return b""
        return self.prompt_token_ids[self.given_tokens : len(self.prompt_token_ids)].tobytes()

    def resumed(self, generated: "array[int]") -> "Request":
        """Return the request that continues after `generated`, tokens that it has generated since it started."""
        sampling = replace(
            self.sampling,
            max_new_tokens=self.sampling.max_new_tokens - len(generated),
            min_tokens=max(self.sampling.min_tokens - len(generated), 0),
        )
        tokens = self.prompt_token_ids + generated
        return replace(
            self, prompt_token_ids=tokens, sampling=sampling, num_generated=self.num_generated + len(generated)
        )
