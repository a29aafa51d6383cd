"""Generate synthetic requests. A random process sets the arrival times. A mix of request kinds sets the lengths."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longhelix.errors import UserError
from longhelix.scheduler.request import ANY_SERVICE, MOST_TOKENS, ServiceLevel
from longhelix.simulate.arrival import Arrival
from longhelix.values import one_of, real, whole

PROCESSES = ("poisson", "gamma")
# Assumption: prompt and answer lengths are log-normal, with medians near those of Azure's conversation trace (2023).
_CHAT_MEDIANS, _CHAT_SIGMA = (1020, 129), 1.0
_CHAT_MOST = 32_768


@dataclass(frozen=True)
class Lengths:
    """Distribution of token counts from `least` to `most`.

    The distribution is log-normal if `median` is set, and log-uniform otherwise.
    """

    least: int
    most: int
    median: int | None = None

    def __post_init__(self) -> None:
        whole("the minimum length", self.least, 1, MOST_TOKENS)
        whole("the maximum length", self.most, self.least, MOST_TOKENS)

    def draw(self, random: np.random.Generator) -> int:
        if self.median is not None:
            drawn = self.median * np.exp(random.normal(0.0, _CHAT_SIGMA))
        else:
            drawn = np.exp(random.uniform(np.log(self.least), np.log(self.most)))
        return min(max(round(float(drawn)), self.least), self.most)


@dataclass(frozen=True)
class Component:
    """A kind of request, with its weight in the mix and the distributions of its lengths."""

    weight: float
    prompt: Lengths
    output: Lengths

    def __post_init__(self) -> None:
        real("the weight of a kind of request", self.weight, lambda value: 0 < value < 1e9, "a number above 0")


def chat(weight: float) -> Component:
    """Return a kind of request whose lengths are typical of chats."""
    prompt, output = (Lengths(1, _CHAT_MOST, median) for median in _CHAT_MEDIANS)
    return Component(weight, prompt, output)


def parse_mix(text: str) -> tuple[Component, ...]:
    """Parse a mix of request kinds, such as `95%:chat,5%:1M-2M:100-500`.

    Each kind has a weight, followed by `chat` or by prompt lengths and answer lengths. The mix `chat` means that all
    requests are chats. Raises UserError if the mix is invalid.
    """
    return tuple(_component(entry.strip()) for entry in text.split(","))


def _component(entry: str) -> Component:
    weight, *lengths = entry.split(":") if entry != "chat" else ("1", "chat")
    try:
        share = float(weight.removesuffix("%"))
        if lengths == ["chat"]:
            return chat(share)
        prompt, output = map(_lengths, lengths)
        return Component(share, prompt, output)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{entry!r} is not a kind of request: write WEIGHT:chat, or WEIGHT:PROMPT:ANSWER with lengths such as 1M-2M"
        ) from error


def _lengths(text: str) -> Lengths:
    least, _, most = text.partition("-")
    return Lengths(_size(least), _size(most or least))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})(|[kKmMgG])", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()]


@dataclass(frozen=True)
class Synthetic:
    """Workload of `num_requests` random requests at a mean rate of `rate_per_s`.

    All iterations with the same `seed` yield the same requests.

    If `process` is "poisson", gaps between arrivals are exponentially distributed. If it is "gamma", gaps are
    gamma-distributed with the coefficient of variation `burstiness`. A burstiness of 1 is equivalent to "poisson". With
    larger values, requests arrive in bursts.
    """

    num_requests: int
    rate_per_s: float
    mix: tuple[Component, ...]
    service: ServiceLevel = ANY_SERVICE
    process: str = "poisson"
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole("requests", self.num_requests, 1, 10**9)
        real("rate", self.rate_per_s, lambda value: 0 < value < 1e9, "requests per second, above 0")
        one_of("arrivals", self.process, PROCESSES)
        real("burstiness", self.burstiness, lambda value: 0 < value < 1e3, "a number above 0")
        whole("seed", self.seed, 0, 2**63 - 1)

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[Arrival]:
        random = np.random.default_rng(self.seed)
        shape = 1.0 if self.process == "poisson" else self.burstiness**-2
        weights = np.array([component.weight for component in self.mix])
        bounds, now_s = np.cumsum(weights / weights.sum()), 0.0
        for _ in range(self.num_requests):
            now_s += float(random.gamma(shape, 1 / (shape * self.rate_per_s)))
            kind = min(int(np.searchsorted(bounds, random.random(), side="right")), len(self.mix) - 1)
            component = self.mix[kind]
            prompt_tokens, output_tokens = component.prompt.draw(random), component.output.draw(random)
            yield Arrival(now_s, prompt_tokens, output_tokens, self.service)
