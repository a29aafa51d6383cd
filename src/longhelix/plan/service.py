"""Predict the latency and throughput of configurations under load: TTFT, time between tokens, users and rate."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.memory import Memory, memory
from longhelix.perf.prefill import prefill
from longhelix.perf.setting import Setting
from longhelix.perf.step import cycle_seconds, token_seconds
from longhelix.plan.demand import Demand, Kind
from longhelix.scheduler.work import NO_WORK, Work

CHUNKS = tuple(2**power for power in range(5, 14))
_LATE = 0.05  # fraction of requests that wait longer than reported, because reported waits are 95th percentiles
_MOST_BUSY = 0.95  # maximum fraction of a stage's time for prefill. Waits grow without bound as the fraction nears 1
_HALVINGS = 40
_NODES = 4  # number of chunks per prompt to evaluate; step times are nearly linear in between


@dataclass(frozen=True)
class Service:
    """Latency and throughput of one instance of each configuration. All arrays have the same shape."""

    ttl_s: Array  # mean time between tokens
    ttl_p95_s: Array  # time between tokens in the longest step, which has the last chunk of the longest prompt
    ttft_s: Array  # TTFT of the longest prompt: the 95th percentile if there is a demand, otherwise without a wait
    users: Array  # number of requests that decode at the same time
    rate_per_s: Array  # requests per second; nan without a demand
    replicas: Array  # number of instances that the demand's rate needs; 1 without a rate

    @property
    def tokens_per_s(self) -> Array:
        return self.users / self.ttl_s

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Service":
        return Service(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True)
class ServiceLoad:
    """The load on a configuration: the requests of a demand, or endless requests with one prompt at a time."""

    setting: Setting
    context: int  # tokens of the longest request
    demand: Demand | None = None  # None for endless requests
    ttft_s: float | None = None  # TTFT target, which limits the request rate; None for no target

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind(1.0, self.context, 1),) if self.demand is None else self.demand.kinds

    @property
    def kv_tokens(self) -> float:
        """Mean number of KV tokens of a decoding request."""
        return float(self.context) if self.demand is None else self.demand.kv_tokens

    @property
    def prefix_hit(self) -> float:
        return 0.0 if self.demand is None else self.demand.prefix_hit

    @property
    def longest_prompt(self) -> int:
        return max(kind.input_tokens for kind in self.kinds)

    def new_tokens(self, kind: Kind) -> float:
        """Return the number of prompt tokens that are not in the prefix cache."""
        return kind.input_tokens * (1 - self.prefix_hit)

    def memory(self, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Memory:
        """Return the memory of the fullest rank when `batch` requests have their full length.

        The batch includes one of the longest requests.
        """
        held = float(self.context) if self.demand is None else self.demand.held_tokens
        longest = float(self.context) if self.demand is None else float(self.demand.longest)
        context = held + (longest - held) / np.maximum(batch, 1.0)
        return memory(self.setting, layouts=layouts, batch=batch, context=context, chunk=np.minimum(chunk, longest))

    def memory_bytes(self, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Array:
        return self.memory(layouts, batch, chunk).total_bytes

    def decodes(self, layouts: Layouts, batch: float | Array) -> Work:
        """Return the decode work of one stage in one step."""
        return layouts.decode(np.ceil(batch / layouts.pp), self.kv_tokens)

    def token_seconds(self, layouts: Layouts, batch: Array) -> Array:
        """Return the time between tokens, in seconds, when `batch` requests decode and no prompt is computed."""
        return token_seconds(self.setting, layouts, batch, self.kv_tokens)


def mixed_seconds(use: ServiceLoad, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Array:
    """Return the seconds between tokens of `batch` requests in a step that has the longest prompt's last chunk."""
    rows = np.minimum(chunk, use.longest_prompt * (1 - use.prefix_hit))
    last = layouts.chunk(rows, use.longest_prompt - rows)
    return cycle_seconds(use.setting, layouts, last + use.decodes(layouts, batch)) / use.setting.drafts.accepted


@dataclass(frozen=True)
class Prompts:
    """Prefill times of one instance of each configuration. All arrays have the same shape."""

    longest_s: Array  # time from the longest prompt's first chunk to its first new token
    busy_s: Array  # mean time that a prompt occupies a stage
    chunks: Array  # mean number of chunks per prompt
    wait_s: Array  # mean wait for the prompt in progress: E[busy^2] / (2 E[busy])

    def ttft_s(self, busy: Array) -> Array:
        """Return the 95th percentile of the longest prompt's TTFT, in seconds.

        The result is the prompt's own time plus the 95th percentile of the wait, with
        P(wait > t) = busy * exp(-t (1 - busy) / wait_s).

        Args:
            busy: fraction of the time in which prompts are computed.
        """
        return self.longest_s + self.wait_s / (1 - busy) * np.log(np.maximum(busy, _LATE) / _LATE)

    def most_busy(self, ttft_s: float | None, most: Array) -> Array:
        """Return the largest fraction of time for prompts, up to `most`, for which the TTFT is at most `ttft_s`.

        Where even a prompt that never waits takes longer, the wait may double its TTFT. The configuration then misses
        the target, and its rate shows what it serves all the same.
        """
        most = np.minimum(most, _MOST_BUSY)
        if ttft_s is None:
            return most
        limit_s = np.where(self.longest_s <= ttft_s, ttft_s, 2 * self.longest_s)
        least = np.zeros_like(most)
        for _ in range(_HALVINGS):
            half = (least + most) / 2
            keeps = self.ttft_s(half) <= limit_s
            least, most = np.where(keeps, half, least), np.where(keeps, most, half)
        return np.where(self.ttft_s(most) <= limit_s, most, least)


def prompts(use: ServiceLoad, layouts: Layouts, chunk: Array, decodes: Work = NO_WORK) -> Prompts:
    """Return the prefill times of layouts.

    Args:
        chunk: chunk size of each layout, in tokens, (n,).
        decodes: decode work in the same step as each chunk.
    """
    found = [
        prefill(
            use.setting,
            layouts,
            use.new_tokens(kind),
            chunk,
            prefix=kind.input_tokens * use.prefix_hit,
            beside=decodes,
            nodes=_NODES,
        )
        for kind in use.kinds
    ]
    busy_s = _mean(use.kinds, [each.busy_s for each in found])
    squared = _mean(use.kinds, [each.busy_s**2 for each in found])
    chunks = _mean(use.kinds, [np.ceil(use.new_tokens(kind) / chunk) for kind in use.kinds])
    return Prompts(np.max([each.seconds for each in found], axis=0), busy_s, chunks, squared / (2 * busy_s))


def service(use: ServiceLoad, layouts: Layouts, batch: Array, chunk: Array) -> Service:
    """Predict the latency and throughput of layouts, each with a batch and a chunk size, (n,).

    Prompts are computed one at a time, in the order of arrival (M/G/1). While prompts are computed, every step contains
    a chunk. If the demand has a rate, the result includes the number of instances that the rate needs. Each instance
    receives an equal part of the rate.
    """
    decodes = use.decodes(layouts, batch)
    alone_s, mixed_s = use.token_seconds(layouts, batch), mixed_seconds(use, layouts, batch, chunk)
    found = prompts(use, layouts, chunk, decodes)
    if use.demand is None:
        unknown = np.full(len(layouts), np.nan)
        return Service(
            ttl_s=alone_s,
            ttl_p95_s=mixed_s,
            ttft_s=found.longest_s,
            users=batch + layouts.zeros,
            rate_per_s=unknown,
            replicas=layouts.ones,
        )
    beside_s = layouts.pp * found.busy_s / found.chunks / use.setting.drafts.accepted
    output_tokens = use.demand.output_tokens
    # At full load, each user decodes `output_tokens` tokens. Some of these are in slower steps that contain a chunk.
    needed = batch * found.busy_s / output_tokens
    busy = found.most_busy(use.ttft_s, needed / alone_s / (1 + needed * (1 / alone_s - 1 / beside_s)))
    replicas = layouts.ones
    if use.demand.rate_per_s is not None:
        replicas = np.maximum(np.ceil(use.demand.rate_per_s * found.busy_s / busy), 1.0)
        busy = use.demand.rate_per_s * found.busy_s / replicas
    ttl_s = 1 / ((1 - busy) / alone_s + busy / beside_s)
    rate_per_s = busy / found.busy_s
    return Service(
        ttl_s=ttl_s,
        ttl_p95_s=mixed_s,
        ttft_s=found.ttft_s(busy),
        users=rate_per_s * output_tokens * ttl_s,
        rate_per_s=rate_per_s,
        replicas=replicas,
    )


def _mean(kinds: tuple[Kind, ...], values: list[Array]) -> Array:
    mean: Array = sum((kind.share * value for kind, value in zip(kinds, values, strict=True)), np.zeros_like(values[0]))
    return mean
