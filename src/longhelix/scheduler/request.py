"""What is asked for: requests, how their tokens are chosen, and what times they are to keep."""

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
_MOST_STOPS, _LONGEST_STOP = 64, 1000  # strings, characters: every new token is looked at for all of them
_MOST_STOP_IDS = 1024
# Below, the logits' distances overflow float32, and the draw is greedy in all but name; above, they vanish, and all
# tokens are alike; a penalty likewise.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
_MOST_PENALTY = 1e6
_MOST_BIASED = 1024  # token ids
_MOST_BIAS, _MOST_SUBTRACTED = 100, 2  # of logits, as OpenAI has it
MOST_PRIORITY = 1_000_000
_LONGEST_NAME = 256  # characters


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the new tokens of one request.

    What is done to logits, in this order: logit_bias adds numbers to those of token ids; presence_penalty, and
    frequency_penalty as often as the request has generated the token, are subtracted from those that it has generated
    at all; repetition_penalty makes those that it has generated, or that are in its prompt, less likely; temperature
    and filters follow. temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties
    0 switch these off.
    Draws are keyed by (seed, position): the same seed gives the same tokens in any batch. `stop` strings end the
    text before themselves. Among the first min_tokens new tokens is none that ends a text, whatever ignore_eos says,
    and no stop string ends it within these. logprobs: the N best of the model's own distribution at each new token,
    before all of this (None: none); prompt_logprobs: the same at each token of the prompt, all of which is computed for
    it, whatever is cached. With it max_new_tokens may be 0.
    skip_special_tokens: whether the text leaves special tokens out. include_stop_str_in_output: whether it has the stop
    string, or the text of the stop token, that ended it.
    guide: what the text has to be; its last token ends the request, unless max_new_tokens or a stop does before. Of
    tokens that it does not allow none is chosen, whatever else is asked for: where it allows none but those that end
    the text, one of these comes in spite of min_tokens.
    Every value is checked for type and range, whoever makes it: Python, the command line, a message.
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

    def __post_init__(self) -> None:
        """Raises UserError for what no request can have; keeps plain Python values."""
        least, note = (1, " (0 needs prompt_logprobs)") if self.prompt_logprobs is None else (0, "")
        max_new_tokens = whole("max_new_tokens", self.max_new_tokens, least, MOST_TOKENS, note)
        checked = {
            "max_new_tokens": max_new_tokens,
            "temperature": real(
                "temperature",
                self.temperature,
                lambda value: value == 0 or _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE,
                f"0 (greedy), or a number from {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE}",
            ),
            "top_k": whole("top_k", self.top_k, 0, MOST_TOKENS, " (0 is off)"),
            "top_p": real("top_p", self.top_p, lambda value: 0 < value <= 1, "a number above 0 and at most 1 (off)"),
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
            raise UserError("a text with a guide ends where the guide does: leave out ignore_eos or the guide")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def most_sampled(self) -> int:
        """The tokens that are sampled at most. One ends a request that wants none, and is dropped."""
        return max(self.max_new_tokens, 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how often the request has generated each token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_generated(self) -> bool:
        """Whether the next token depends on those that the request has generated, beside what the model says."""
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
    found: dict[int, float] = {}
    for key, bias in entries("logit_bias", value, _MOST_BIASED, "token ids to numbers"):
        token_id = whole("a token id of logit_bias", key, 0, MOST_TOKENS)
        found[token_id] = real(
            f"the logit bias of token {token_id}", bias, lambda number: abs(number) <= _MOST_BIAS, allowed
        )
    return found


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

    ttft_slo_s: the time to its first token that it wants; tbt_slo_s: the most between two tokens. priority: requests
    with a higher one go first, whatever the policy. client: whose it is; clients have equal shares of prefill, or
    weighted ones, while they compete. cache_salt: it shares cached KV only with requests that have the same.
    growth_limit_tokens: the tokens of it that a KVP rank has before the next one joins, rounded down to KV blocks.
    """

    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    growth_limit_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError for what no request can ask; keeps plain Python values."""
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
    """Token ids of which slices are taken, int32: an array, or what makes them when it is asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "array[int]": ...

    def __add__(self, more: "array[int]", /) -> "TokenIds": ...


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a prompt, from `start` on, that an image takes: `rows` of its grid, one after the other, of
    `columns` each. digest: SHA-256 of what it shows, grid included."""

    start: int
    rows: int
    columns: int
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def shift(self) -> int:
        """What is added to the positions of what follows it."""
        return max(self.rows, self.columns) - self.num_tokens


@dataclass(frozen=True)
class Request:
    """One prompt on its way. `seed` is resolved (sampling.seed, or drawn at admission); times in seconds.

    images: what the prompt shows, in order. guide_s: what a rank takes to compile its guide.

    num_generated: of the prompt's last tokens, those that the request itself has generated, before it was preempted.
    """

    id: int
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    arrival_s: float
    service: ServiceLevel = ANY_SERVICE
    num_generated: int = 0
    images: tuple[ImageSpan, ...] = ()
    guide_s: float = 0.0

    @property
    def capacity_tokens(self) -> int:
        """The most tokens it can ever hold: prompt and new ones."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens

    @property
    def num_rows(self) -> int:
        """The most tokens whose KV it can hold. The last new one has none."""
        return len(self.prompt_token_ids) + self.sampling.most_sampled - 1

    @property
    def given_tokens(self) -> int:
        """The tokens of the prompt that came with it."""
        return len(self.prompt_token_ids) - self.num_generated

    @property
    def generated_token_ids(self) -> bytes:
        """`generated_token_ids` of the `NewSequence`."""
        if not (self.num_generated and self.sampling.needs_generated):
            return b""
        return self.prompt_token_ids[self.given_tokens : len(self.prompt_token_ids)].tobytes()

    def resumed(self, generated: "array[int]") -> "Request":
        """The request that goes on after `generated`, more of its tokens than it began with."""
        left = replace(
            self.sampling,
            max_new_tokens=self.sampling.max_new_tokens - len(generated),
            min_tokens=max(self.sampling.min_tokens - len(generated), 0),
        )
        tokens = self.prompt_token_ids + generated
        return replace(self, prompt_token_ids=tokens, sampling=left, num_generated=self.num_generated + len(generated))
