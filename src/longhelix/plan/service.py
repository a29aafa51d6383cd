"""What a configuration gives those who use it: time to first token and from token to token, together."""

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
_LATE = 0.05  # the share of requests that may wait for longer: what is told of waits is their 95th percentile
_MOST_BUSY = 0.95  # of a stage's time; with more, waits have no bound that a plan could keep
_HALVINGS = 40
_NODES = 4  # chunks of a prompt that are costed; step times are nearly linear in between


@dataclass(frozen=True)
class Service:
    """Arrays of one shape, of one instance each. ttl_s: from token to token, the mean; ttl_p95_s: while a prompt's last
    chunk, the longest step, runs beside; ttft_s: of the longest prompt, its 95th percentile where a demand says how
    many come, and otherwise without a wait. users: that have a token at a time; rate_per_s: of requests, nan where no
    demand says how long they last. replicas: instances that a demand's rate takes; 1 where there is none."""

    ttl_s: Array
    ttl_p95_s: Array
    ttft_s: Array
    users: Array
    rate_per_s: Array
    replicas: Array

    @property
    def tokens_per_s(self) -> Array:
        return self.users / self.ttl_s

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Service":
        return Service(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True)
class Use:
    """What configurations are used for: requests of `context` tokens that have been there for ever, each prompt beside
    them alone; or those of a demand. ttft_s: the most, which bounds how many may come."""

    setting: Setting
    context: int
    demand: Demand | None = None
    ttft_s: float | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind(1.0, self.context, 1),) if self.demand is None else self.demand.kinds

    @property
    def kv_tokens(self) -> float:
        """Of a request that decodes."""
        return float(self.context) if self.demand is None else self.demand.kv_tokens

    @property
    def prefix_hit(self) -> float:
        return 0.0 if self.demand is None else self.demand.prefix_hit

    @property
    def longest_prompt(self) -> int:
        return max(kind.input_tokens for kind in self.kinds)

    def new_tokens(self, kind: Kind) -> float:
        """Of a prompt, whose KV is not there before."""
        return kind.input_tokens * (1 - self.prefix_hit)

    def memory(self, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Memory:
        """On the fullest rank, with the tokens that `batch` requests hold at their ends, one of them a longest one."""
        held = float(self.context) if self.demand is None else self.demand.held_tokens
        longest = float(self.context) if self.demand is None else float(self.demand.longest)
        context = held + (longest - held) / np.maximum(batch, 1.0)
        return memory(self.setting, layouts, batch, context, np.minimum(chunk, longest))

    def memory_bytes(self, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Array:
        return self.memory(layouts, batch, chunk).total_bytes

    def decodes(self, layouts: Layouts, batch: float | Array) -> Work:
        """What one stage has of them at a time."""
        return layouts.decode(np.ceil(batch / layouts.pp), self.kv_tokens)

    def token_seconds(self, layouts: Layouts, batch: Array) -> Array:
        """From token to token where `batch` requests decode, and nothing else is done."""
        return token_seconds(self.setting, layouts, batch, self.kv_tokens)


def mixed_seconds(use: Use, layouts: Layouts, batch: float | Array, chunk: float | Array) -> Array:
    """From token to token in a step with the last chunk of the longest prompt beside `batch` requests that decode."""
    rows = np.minimum(chunk, use.longest_prompt * (1 - use.prefix_hit))
    last = layouts.chunk(rows, use.longest_prompt - rows)
    return cycle_seconds(use.setting, layouts, last + use.decodes(layouts, batch)) / use.setting.accepted_tokens


@dataclass(frozen=True)
class Prompts:
    """How one instance prefills, arrays of one shape. longest_s: from the longest prompt's first chunk to its first new
    token; busy_s: of a stage, by a mean prompt; chunks: of a mean prompt; wait_s: E[busy^2] / (2 E[busy]), for which
    one waits behind the prompt that is there."""

    longest_s: Array
    busy_s: Array
    chunks: Array
    wait_s: Array

    def ttft_s(self, busy: Array) -> Array:
        """Of the longest prompt, where prompts take a share `busy` of the time: its own, and what one of 20 waits for
        longer than, P(wait > t) being busy exp(-t (1 - busy) / wait_s)."""
        return self.longest_s + self.wait_s / (1 - busy) * np.log(np.maximum(busy, _LATE) / _LATE)

    def most_busy(self, ttft_s: float | None, most: Array) -> Array:
        """The largest share up to `most` that keeps the TTFT."""
        most = np.minimum(most, _MOST_BUSY)
        if ttft_s is None:
            return most
        least = np.zeros_like(most)
        for _ in range(_HALVINGS):
            half = (least + most) / 2
            keeps = self.ttft_s(half) <= ttft_s
            least, most = np.where(keeps, half, least), np.where(keeps, most, half)
        return np.where(self.ttft_s(most) <= ttft_s, most, least)


def prompts(use: Use, layouts: Layouts, chunk: Array, beside: Work = NO_WORK) -> Prompts:
    """Of layouts with a chunk size each, of shape (n,), and the decodes `beside` every chunk."""
    found = [
        prefill(
            use.setting,
            layouts,
            use.new_tokens(kind),
            chunk,
            prefix=kind.input_tokens * use.prefix_hit,
            beside=beside,
            nodes=_NODES,
        )
        for kind in use.kinds
    ]
    busy_s = _mean(use.kinds, [each.busy_s for each in found])
    squared = _mean(use.kinds, [each.busy_s**2 for each in found])
    chunks = _mean(use.kinds, [np.ceil(use.new_tokens(kind) / chunk) for kind in use.kinds])
    return Prompts(np.max([each.seconds for each in found], axis=0), busy_s, chunks, squared / (2 * busy_s))


def service(use: Use, layouts: Layouts, batch: Array, chunk: Array) -> Service:
    """Of layouts, each with a batch and a chunk size: all of shape (n,).

    Prompts are taken one by one as they come (M/G/1), for a share of the time in which every step has a chunk. With a
    demand's rate there are as many instances as it takes, and each has its part of it.
    """
    decodes = use.decodes(layouts, batch)
    alone_s, mixed_s = use.token_seconds(layouts, batch), mixed_seconds(use, layouts, batch, chunk)
    found = prompts(use, layouts, chunk, decodes)
    if use.demand is None:
        unknown = np.full(len(layouts), np.nan)
        return Service(alone_s, mixed_s, found.longest_s, batch + layouts.zeros, unknown, layouts.ones)
    beside_s = layouts.pp * found.busy_s / found.chunks / use.setting.accepted_tokens
    output_tokens = use.demand.output_tokens
    # With all users there: each needs `output_tokens` tokens, of which prompts slow down some.
    needed = batch * found.busy_s / output_tokens
    busy = found.most_busy(use.ttft_s, needed / alone_s / (1 + needed * (1 / alone_s - 1 / beside_s)))
    replicas = layouts.ones
    if use.demand.rate_per_s is not None:
        # Of what is late already where none waits, one instance, and nothing comes.
        replicas = np.maximum(np.ceil(use.demand.rate_per_s * found.busy_s / np.where(busy > 0, busy, np.inf)), 1.0)
        busy = np.minimum(use.demand.rate_per_s * found.busy_s / replicas, busy)
    ttl_s = 1 / ((1 - busy) / alone_s + busy / beside_s)
    rate_per_s = busy / found.busy_s
    return Service(ttl_s, mixed_s, found.ttft_s(busy), rate_per_s * output_tokens * ttl_s, rate_per_s, replicas)


def _mean(kinds: tuple[Kind, ...], values: list[Array]) -> Array:
    mean: Array = sum((kind.share * value for kind, value in zip(kinds, values, strict=True)), np.zeros_like(values[0]))
    return mean
