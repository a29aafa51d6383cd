"""Plan disaggregated serving: separate instances prefill and decode, and a link transfers the KV between them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.linear import request_bytes
from longhelix.plan.candidate import degrees
from longhelix.plan.question import Question
from longhelix.plan.service import CHUNKS, ServiceLoad, prompts
from longhelix.plan.space import Space
from longhelix.plan.sweep import MOST_BATCH, largest
from longhelix.spec import LinearAttention
from longhelix.spec.layout import Layout

_BEST = 24  # maximum number of prefill candidates, and of decode candidates, that the search combines


@dataclass(frozen=True)
class Disaggregated:
    """A combination of prefill and decode instances, with its predicted latency and throughput."""

    prefill_layout: dict[str, int | str]
    prefills: int  # number of prefill instances
    chunk_tokens: int  # prompt tokens per step
    decode_layout: dict[str, int | str]
    decodes: int  # number of decode instances
    batch: int  # number of requests per decode instance
    gpus: int  # total over all instances
    users: int
    rate_per_s: float  # requests per second
    ttl_s: float
    ttft_s: float  # includes `transfer_s`
    transfer_s: float  # time to send the KV of the longest prompt
    tokens_per_s_per_gpu: float
    cost_per_million_tokens: float | None  # None without a GPU price


@dataclass(frozen=True)
class _Side:
    """Candidates for the prefill instances or for the decode instances. All arrays have the shape (n,)."""

    layout: NDArray[np.intp]  # index of the layout in the space
    size: Array  # chunk size for prefill, batch size for decode
    rate_per_s: Array  # requests per second per instance
    gpus: Array  # number of GPUs per instance
    seconds: Array  # TTFT for prefill, TTL for decode

    def best(self) -> "_Side":
        """Return up to _BEST candidates with the highest request rate per GPU, at most one per number of GPUs."""
        order = np.lexsort((self.seconds, -self.rate_per_s, self.gpus))
        _, first = np.unique(self.gpus[order], return_index=True)
        first = order[first]
        chosen = first[np.argsort(-self.rate_per_s[first] / self.gpus[first], kind="stable")[:_BEST]]
        return self.take(chosen)

    def take(self, index: NDArray[np.intp]) -> "_Side":
        numbers = (values[index] for values in (self.size, self.rate_per_s, self.gpus, self.seconds))
        return _Side(self.layout[index], *numbers)


def disaggregated(question: Question, space: Space) -> Disaggregated | None:
    """Find the best combination of prefill and decode instances that meets the targets.

    The best combination has the highest tokens/s/GPU. If the demand has a rate, or if the question is about the fewest
    GPUs, the best combination has the fewest GPUs instead. Returns None if no combination meets the targets, or if the
    question has no demand.
    """
    demand = question.demand
    if demand is None:
        return None
    use = ServiceLoad(question.setting, question.context, demand, question.ttft_s)
    transfer_s = _transfer_seconds(use)
    ttft_s = None if question.ttft_s is None else question.ttft_s - transfer_s
    first, second = _prefills(use, space, ttft_s).best(), _decodes(question, use, space).best()
    pairs = [
        pair
        for prefill in range(len(first.layout))
        for decode in range(len(second.layout))
        if (pair := _numbers(question, first=first, prefill=prefill, second=second, decode=decode)) is not None
    ]
    if not pairs:
        return None
    _, prefills, decodes, prefill, decode = min(pairs)
    served = min(prefills * float(first.rate_per_s[prefill]), decodes * float(second.rate_per_s[decode]))
    served = served if demand.rate_per_s is None else demand.rate_per_s
    gpus = prefills * int(first.gpus[prefill]) + decodes * int(second.gpus[decode])
    tokens_per_s_per_gpu = served * demand.output_tokens / gpus
    return Disaggregated(
        prefill_layout=degrees(space.layouts, int(first.layout[prefill])),
        prefills=prefills,
        chunk_tokens=int(first.size[prefill]),
        decode_layout=degrees(space.layouts, int(second.layout[decode])),
        decodes=decodes,
        batch=int(second.size[decode]),
        gpus=gpus,
        users=int(served * demand.output_tokens * second.seconds[decode]),
        rate_per_s=served,
        ttl_s=float(second.seconds[decode]),
        ttft_s=float(first.seconds[prefill]) + transfer_s,
        transfer_s=transfer_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        cost_per_million_tokens=(
            None if question.gpu_hour is None else question.gpu_hour * 1e6 / (3600 * tokens_per_s_per_gpu)
        ),
    )


def _numbers(
    question: Question, first: _Side, prefill: int, second: _Side, decode: int
) -> tuple[float, int, int, int, int] | None:
    """Find the best numbers of instances for one prefill candidate and one decode candidate.

    Returns:
        A tuple (sort key, prefill instances, decode instances, prefill index, decode index), or None if no
        numbers of instances meet the targets.
    """
    demand = question.demand
    assert demand is not None
    most, sizes = question.max_gpus, (first.gpus[prefill], second.gpus[decode])
    prefills, decodes = np.arange(1.0, most // sizes[0] + 1)[:, None], np.arange(1.0, most // sizes[1] + 1)
    gpus = prefills * sizes[0] + decodes * sizes[1]
    rate = np.minimum(prefills * first.rate_per_s[prefill], decodes * second.rate_per_s[decode])
    meets = (gpus <= most) & (rate * demand.output_tokens * second.seconds[decode] >= question.users)
    if demand.rate_per_s is not None:
        meets &= rate >= demand.rate_per_s
    if not meets.any():
        return None
    fewest = demand.rate_per_s is not None or question.fewest_gpus
    worth = np.where(meets, gpus if fewest else -rate / gpus, np.inf)
    row, column = divmod(int(np.argmin(worth)), worth.shape[1])
    return float(worth[row, column]), row + 1, column + 1, prefill, decode


def _prefills(use: ServiceLoad, space: Space, ttft_s: float | None) -> _Side:
    """Return all layouts with all chunk sizes that fit, each at the highest rate that meets the TTFT target."""
    index = np.repeat(np.arange(len(space)), len(CHUNKS))
    chunk = np.tile(np.array(CHUNKS, dtype=np.float64), len(space))
    layouts = space.layouts.take(index)
    held = np.flatnonzero(use.memory_bytes(layouts, layouts.ones, chunk) <= use.setting.capacity_bytes(layouts))
    layouts, index, chunk = layouts.take(held), index[held], chunk[held]
    found = prompts(use, layouts, chunk)
    busy = found.most_busy(ttft_s, layouts.ones)
    served = _Side(
        layout=index, size=chunk, rate_per_s=busy / found.busy_s, gpus=layouts.world_size, seconds=found.ttft_s(busy)
    )
    return served if ttft_s is None else served.take(np.flatnonzero(served.seconds <= ttft_s))


def _decodes(question: Question, use: ServiceLoad, space: Space) -> _Side:
    """Return all layouts, each with the largest batch that fits in memory and meets the TTL target."""
    layouts = space.layouts

    def keeps(batch: Array) -> Mask:
        kept: Mask = use.memory_bytes(layouts, batch, 0.0) <= use.setting.capacity_bytes(layouts)
        for limit_s in (question.ttl_s, question.ttl_with_prefill_s):  # without prefill, every step is as long
            if limit_s is not None:
                kept &= use.token_seconds(layouts, batch) <= limit_s
        return kept

    batch = largest(keeps, np.full(len(layouts), float(MOST_BATCH)))
    index = np.flatnonzero(batch > 0)
    layouts, batch = layouts.take(index), batch[index]
    ttl_s = use.token_seconds(layouts, batch)
    assert use.demand is not None
    return _Side(
        layout=index,
        size=batch,
        rate_per_s=batch / (ttl_s * use.demand.output_tokens),
        gpus=layouts.world_size,
        seconds=ttl_s,
    )


def _transfer_seconds(use: ServiceLoad) -> float:
    """Return the time, in seconds, to send the longest prompt's KV and linear attention states to another GPU.

    The transfer uses the scale-out link of one GPU.
    """
    setting, link = use.setting, use.setting.system.network.scale_out
    kept = use.longest_prompt * setting.kv_token_bytes
    one = Layouts.of([Layout()])
    mixers = (mixer for layer in setting.model.layers for mixer in layer.mixers)
    kept += sum(float(request_bytes(one, mixer)[0]) for mixer in mixers if isinstance(mixer, LinearAttention))
    return link.latency_s + kept / link.bytes_per_s
