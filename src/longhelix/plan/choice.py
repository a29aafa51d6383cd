"""Choose the configuration (layout, batch and chunk size) that answers a question best."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.plan.candidate import degrees
from longhelix.plan.question import Question
from longhelix.plan.service import Service, ServiceLoad, mixed_seconds, service
from longhelix.plan.space import STRATEGIES, Space
from longhelix.plan.sweep import MOST_BATCH, largest, units
from longhelix.units import digits

_BLOCK = 64  # number of layouts per round of the search
_STEP = 2**0.25  # ratio between successive batch sizes that the search tries for a demand
_NEAREST = 3
# How much TTFT and throughput a shorter step with a chunk may cost.
LITTLE_MORE, LITTLE_LESS = 1.1, 0.99
_Index = NDArray[np.intp]
_Keeps = Callable[[Layouts, Array, Array], Mask]  # arguments: layouts, batches, chunk sizes


@dataclass(frozen=True)
class Choice:
    """A configuration and its predicted service. All values apply at the same time."""

    strategy: str
    layout: dict[str, int | str]  # as in `Candidate`
    replicas: int
    gpus: int  # total over all replicas
    batch: int  # number of requests that decode together in one replica
    users: int  # number of requests that all replicas serve at the same time
    chunk_tokens: int  # prompt tokens in one step, in addition to the batch
    ttl_s: float  # mean time between tokens (TPOT)
    ttl_p95_s: float  # time between tokens in a step that also computes a chunk of a prompt
    ttft_s: float  # TTFT of the longest prompt
    rate_per_s: float | None  # requests per second; None without a demand
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float
    memory_bytes_per_gpu: int  # memory use of the fullest GPU
    headroom_bytes: int  # free memory on the fullest GPU
    cost_per_million_tokens: float | None  # cost of answer tokens; None without a GPU price
    draft_tokens: int  # draft tokens per request and step, as in `Setting`
    accepted_tokens: float  # accepted tokens per request and step, as in `Setting`; all times include their effect
    violates: tuple[str, ...]  # descriptions of the missed targets


@dataclass(frozen=True)
class _Tried:
    """Configurations, arrays (n,)."""

    layout: _Index  # index of the layout in the space
    batch: Array
    chunk: Array  # chunk size in tokens
    given: Service  # service of one replica
    replicas: Array
    gpus: Array  # total over all replicas

    def take(self, index: _Index) -> "_Tried":
        given = self.given.take(index)
        return _Tried(
            layout=self.layout[index],
            batch=self.batch[index],
            chunk=self.chunk[index],
            given=given,
            replicas=self.replicas[index],
            gpus=self.gpus[index],
        )

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def users(self) -> Array:
        return self.given.users * self.replicas

    @property
    def tokens_per_s_per_gpu(self) -> Array:
        return self.given.tokens_per_s * self.replicas / self.gpus


class Chooser:
    """Finds the best configuration of a space.

    For a given layout and chunk size, steps take longer as the batch grows. Bisection therefore finds the largest batch
    within the TTL.

    The search tries layouts in the order of an optimistic bound. The bound uses the smallest chunk that is fast enough
    and otherwise assumes that prefill is free. The search ends when no remaining layout can beat the best one so far.
    """

    def __init__(self, question: Question, space: Space) -> None:
        self._question, self._space = question, space
        self._use = ServiceLoad(question.setting, question.context, question.demand, question.ttft_s)
        self._chunks = np.array(question.chunks, dtype=np.float64)
        self._unit = units(space.layouts)

    def best(self) -> Choice | None:
        """Return the configuration with the most tokens/s/GPU, or with the fewest GPUs, that meets all targets.

        Returns None if no configuration meets the targets.
        """
        bound = self._bounds()
        order = np.argsort(bound, kind="stable")
        order = order[np.isfinite(bound[order])]
        found: _Tried | None = None
        for start in range(0, len(order), _BLOCK):
            if found is not None and bound[order[start]] > self._value(found)[0]:
                break
            tried = self._tried(order[start : start + _BLOCK])
            tried = tried.take(np.flatnonzero(self._meets(tried)))
            if found is not None:
                tried = _joined(found, tried)
            if len(tried):
                found = self._first(tried)
        if found is None:
            return None
        if self._question.demand is not None:
            found = self._refined(found)
        return self._choice(self._with_short_steps(found))

    def at(self, layout: int, batch: float) -> Choice | None:
        """Return the choice for a layout and a batch, or for the largest smaller batch that leaves room for a chunk.

        Returns None if no request fits in memory with any chunk size.
        """
        every = np.full(len(self._chunks), layout)
        held = np.minimum(self._largest(every, self._chunks, self._fits), batch)
        kept = np.flatnonzero(held == held.max())
        if held.max() == 0:
            return None
        tried = self._given(every[kept], held[kept], self._chunks[kept])
        return self._choice(self._with_short_steps(tried.take(np.array([0]))))

    def nearest(self) -> list[Choice]:
        """Return the _NEAREST configurations that are closest to the targets, each with a different layout."""
        index, chunk = self._with_chunks(np.arange(len(self._space)))
        wanted = np.ceil(self._question.users / np.floor(self._question.max_gpus / self._gpus(index)))
        batch = np.ceil(wanted / self._unit[index]) * self._unit[index]
        batch = np.minimum(batch, np.maximum(self._largest(index, chunk, self._fits), self._unit[index]))
        held = self._fits(self._space.layouts.take(index), batch, chunk)
        tried = self._given(index[held], batch[held], chunk[held])
        order = np.lexsort((tried.gpus, self._missed(tried)))
        _, first = np.unique(tried.layout[order], return_index=True)
        nearest: list[Choice] = []
        for position in np.sort(first):
            choice = self._choice(self._with_short_steps(tried.take(order[[position]])))
            if choice.layout not in [each.layout for each in nearest]:  # with and without HOP-B
                nearest.append(choice)
            if len(nearest) == _NEAREST:
                break
        return nearest

    def _bounds(self) -> Array:
        """Return a lower bound of each layout's `_value`. It is infinite for layouts that cannot meet the targets."""
        index, ttft_s = np.arange(len(self._space)), self._question.ttft_s
        chunk = np.full(len(index), self._chunks[0])
        if ttft_s is not None:
            every, chunks = self._with_chunks(index)
            alone = service(self._use, self._space.layouts.take(every), self._unit[every], chunks)
            late = (alone.ttft_s > ttft_s).reshape(len(index), -1)
            chunk = np.where(late.all(axis=1), np.inf, self._chunks[np.argmin(late, axis=1)])
        possible = np.flatnonzero(np.isfinite(chunk))
        batch = self._largest(possible, chunk[possible], self._within_ttl)
        possible, batch = possible[batch > 0], batch[batch > 0]
        layouts = self._space.layouts.take(possible)
        ttl_s = self._use.token_seconds(layouts, batch)
        bound = np.full(len(index), np.inf)
        bound[possible] = self._worth(batch, batch / ttl_s, layouts.world_size)
        return bound

    def _worth(self, users: Array, tokens_per_s: Array, gpus: Array) -> Array:
        """Return the value to minimise: the GPUs of all required replicas, or the negative tokens/s/GPU."""
        question = self._question
        if question.rate_per_s is not None:
            assert question.demand is not None
            return gpus * np.ceil(question.rate_per_s * question.demand.output_tokens / tokens_per_s)
        if question.fewest_gpus:
            return gpus * np.ceil(question.users / users)
        return -tokens_per_s / gpus

    def _value(self, tried: _Tried) -> Array:
        """Return the value to minimise for each configuration. It is comparable with `_bounds`."""
        if self._question.rate_per_s is not None or self._question.fewest_gpus:
            return tried.gpus
        return -tried.tokens_per_s_per_gpu

    def _first(self, tried: _Tried) -> _Tried:
        return tried.take(np.lexsort((tried.given.ttft_s, tried.given.ttl_s, self._value(tried)))[:1])

    def _tried(self, layouts: _Index) -> _Tried:
        """Return these layouts with all chunk sizes and the largest batch within the targets.

        With a demand, the result also contains smaller batches.
        """
        index, chunk = self._with_chunks(layouts)
        batch = self._largest(index, chunk, self._within_ttl)
        if self._question.demand is not None:
            shares = _STEP ** -np.arange(np.ceil(np.log(np.maximum(batch.max(initial=1.0), 1.0)) / np.log(_STEP)) + 1)
            index, chunk = np.repeat(index, len(shares)), np.repeat(chunk, len(shares))
            batch = np.multiply.outer(batch, shares).ravel()
            multiple = np.floor(batch / self._unit[index]) * self._unit[index]
            batch = np.where(multiple > 0, multiple, np.floor(batch))
            index, batch, chunk = _once(index, batch, chunk)
        elif self._question.ttft_s is not None:
            slow = np.flatnonzero(batch > 0)
            slow = slow[~self._in_time(self._space.layouts.take(index[slow]), batch[slow], chunk[slow])]
            batch[slow] = self._largest(index[slow], chunk[slow], self._within_both)
        # A batch that is a multiple of the unit may have faster steps.
        index, chunk = np.tile(index, 2), np.tile(chunk, 2)
        batch = np.concatenate([batch, batch // self._unit[index[: len(batch)]] * self._unit[index[: len(batch)]]])
        held = batch > 0
        return self._given(index[held], batch[held], chunk[held])

    def _refined(self, found: _Tried) -> _Tried:
        """Try more batch sizes around the best one, with the same layout and chunk size, and return the best result."""
        unit = self._unit[found.layout[0]]
        count = found.batch[0] / unit
        batch = np.unique(np.ceil(np.linspace(count / _STEP, count * _STEP, _BLOCK))) * unit
        index, chunk = np.repeat(found.layout, len(batch)), np.repeat(found.chunk, len(batch))
        kept = self._within_ttl(self._space.layouts.take(index), batch, chunk)
        tried = self._given(index[kept], batch[kept], chunk[kept])
        return self._first(_joined(found, tried.take(np.flatnonzero(self._meets(tried)))))

    def _with_short_steps(self, found: _Tried) -> _Tried:
        """Return the configuration with the smallest chunk size that costs little TTFT and no throughput.

        Large chunks make the steps with a chunk long, and beyond some size they hardly shorten the prefill.
        """
        index, chunk = self._with_chunks(found.layout)
        batch = np.repeat(found.batch, len(chunk))
        held = self._fits(self._space.layouts.take(index), batch, chunk)
        tried = self._given(index[held], batch[held], chunk[held])
        kept = (tried.gpus <= found.gpus) & (tried.tokens_per_s_per_gpu >= LITTLE_LESS * found.tokens_per_s_per_gpu)
        tried = tried.take(np.flatnonzero(kept & (self._missed(tried) <= self._missed(found))))
        quick = np.flatnonzero(tried.given.ttft_s <= LITTLE_MORE * tried.given.ttft_s.min())
        return tried.take(quick[:1])

    def _with_chunks(self, layouts: _Index) -> tuple[_Index, Array]:
        """Return all pairs of these layouts and the chunk sizes."""
        return np.repeat(layouts, len(self._chunks)), np.tile(self._chunks, len(layouts))

    def _given(self, index: _Index, batch: Array, chunk: Array) -> _Tried:
        given = service(self._use, self._space.layouts.take(index), batch, chunk)
        replicas = given.replicas
        if self._question.users > 1:
            needed = np.ceil(self._question.users / np.where(given.users > 0, given.users, np.inf))
            replicas = np.maximum(replicas, needed)
        return _Tried(
            layout=index, batch=batch, chunk=chunk, given=given, replicas=replicas, gpus=replicas * self._gpus(index)
        )

    def _gpus(self, index: _Index) -> Array:
        """Return the number of GPUs of one replica."""
        return self._space.layouts.world_size[index]

    def _largest(self, index: _Index, chunk: Array, keeps: _Keeps) -> Array:
        """Return the largest batch of each layout and chunk size for which `keeps` is true; 0 if it is never true."""
        layouts = self._space.layouts.take(index)
        return largest(lambda batch: keeps(layouts, batch, chunk), np.full(len(index), float(MOST_BATCH)))

    def _fits(self, layouts: Layouts, batch: Array, chunk: Array) -> Mask:
        fits: Mask = self._use.memory_bytes(layouts, batch, chunk) <= self._use.setting.capacity_bytes(layouts)
        return fits

    def _within_ttl(self, layouts: Layouts, batch: Array, chunk: Array) -> Mask:
        """Whether configurations fit, and whether their steps meet the targets, without and with a chunk."""
        kept, question = self._fits(layouts, batch, chunk), self._question
        if question.ttl_s is not None:
            held = np.flatnonzero(kept)
            kept[held] = self._use.token_seconds(layouts.take(held), batch[held]) <= question.ttl_s
        if question.ttl_with_prefill_s is not None:
            held = np.flatnonzero(kept)
            mixed_s = mixed_seconds(self._use, layouts.take(held), batch[held], chunk[held])
            kept[held] = mixed_s <= question.ttl_with_prefill_s
        return kept

    def _in_time(self, layouts: Layouts, batch: Array, chunk: Array) -> Mask:
        assert self._question.ttft_s is not None
        in_time: Mask = service(self._use, layouts, batch, chunk).ttft_s <= self._question.ttft_s
        return in_time

    def _within_both(self, layouts: Layouts, batch: Array, chunk: Array) -> Mask:
        return self._within_ttl(layouts, batch, chunk) & self._in_time(layouts, batch, chunk)

    def _limits(self, tried: _Tried) -> list[tuple[str, str, Array, float]]:
        """Return the name, the unit, the values of the configurations and the limit of each target that is set."""
        question, found = self._question, []
        if question.ttl_s is not None:
            found.append(("TPOT", " ms", 1e3 * tried.given.ttl_s, 1e3 * question.ttl_s))
        if question.ttl_with_prefill_s is not None:
            limit_ms = 1e3 * question.ttl_with_prefill_s
            found.append(("time between tokens during a prefill", " ms", 1e3 * tried.given.ttl_p95_s, limit_ms))
        if question.ttft_s is not None:
            found.append(("TTFT", " s", tried.given.ttft_s, question.ttft_s))
        return [*found, ("GPUs", "", tried.gpus, float(question.max_gpus))]

    def _meets(self, tried: _Tried) -> Mask:
        meets: Mask = np.logical_and.reduce([has <= most for _, _, has, most in self._limits(tried)])
        return meets

    def _missed(self, tried: _Tried) -> Array:
        """Return the sum of the logarithms of the factors by which each configuration misses the targets."""
        missed: Array = np.sum([np.log(np.maximum(has / most, 1.0)) for _, _, has, most in self._limits(tried)], axis=0)
        return missed

    def _choice(self, found: _Tried) -> Choice:
        """Return the choice for one configuration."""
        layouts, given = self._space.layouts.take(found.layout), found.given
        needed = float(self._use.memory_bytes(layouts, found.batch, found.chunk)[0])
        rate = float(given.rate_per_s[0] * found.replicas[0])
        tokens_per_s_per_gpu, gpu_hour = float(found.tokens_per_s_per_gpu[0]), self._question.gpu_hour
        return Choice(
            strategy=STRATEGIES[self._space.strategy[found.layout[0]]].name,
            layout=degrees(layouts, 0),
            replicas=int(found.replicas[0]),
            gpus=int(found.gpus[0]),
            batch=int(found.batch[0]),
            users=max(int(found.users[0]), min(1, math.ceil(found.users[0]))),
            chunk_tokens=int(found.chunk[0]),
            ttl_s=float(given.ttl_s[0]),
            ttl_p95_s=float(given.ttl_p95_s[0]),
            ttft_s=float(given.ttft_s[0]),
            rate_per_s=None if np.isnan(rate) else rate,
            tokens_per_s_per_user=1 / float(given.ttl_s[0]),
            tokens_per_s_per_gpu=tokens_per_s_per_gpu,
            memory_bytes_per_gpu=int(needed),
            headroom_bytes=int(float(self._use.setting.capacity_bytes(layouts)[0]) - needed),
            cost_per_million_tokens=(
                gpu_hour * 1e6 / (3600 * tokens_per_s_per_gpu)
                if gpu_hour is not None and tokens_per_s_per_gpu
                else None
            ),
            draft_tokens=self._use.setting.drafts.tokens,
            accepted_tokens=self._use.setting.drafts.accepted,
            violates=tuple(
                f"{name} {digits(has[0])}{unit} instead of {digits(most)}{unit}"
                for name, unit, has, most in self._limits(found)
                if has[0] > most
            ),
        )


def _once(index: _Index, batch: Array, chunk: Array) -> tuple[_Index, Array, Array]:
    """Remove duplicate configurations."""
    rows = np.unique(np.stack([index.astype(np.float64), batch, chunk]), axis=1)
    return rows[0].astype(np.intp), rows[1], rows[2]


def _joined(first: _Tried, second: _Tried) -> _Tried:
    def both(name: str, one: object, other: object) -> Array:
        return np.concatenate([getattr(one, name), getattr(other, name)])

    names = ("ttl_s", "ttl_p95_s", "ttft_s", "users", "rate_per_s", "replicas")
    given = Service(*(both(name, first.given, second.given) for name in names))
    return _Tried(
        layout=np.concatenate([first.layout, second.layout]),
        batch=both("batch", first, second),
        chunk=both("chunk", first, second),
        given=given,
        replicas=both("replicas", first, second),
        gpus=both("gpus", first, second),
    )
