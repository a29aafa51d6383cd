"""What a simulation looked like over time, in memory that does not grow."""

from collections.abc import Collection
from typing import NamedTuple

from longhelix.scheduler.sequence import Sequence

_MOST_SAMPLES = 256
_LEAST_INTERVAL_S = 0.1


class Sample(NamedTuple):
    """A moment. kv_tokens: room in the KV blocks that running requests hold; kvp: over how many KVP ranks those that
    hold any are spread, on average and at most."""

    time_s: float
    running: int
    waiting: int
    kv_tokens: int
    kvp_mean: float
    kvp_most: int


class Timeline:
    """At most _MOST_SAMPLES moments, about evenly apart but for _LEAST_INTERVAL_S or more, whatever the whole time is:
    where there are more, every other one is forgotten. It asks for the next one at `next_s`."""

    def __init__(self, block_tokens: int) -> None:
        self.samples: list[Sample] = []
        self._block_tokens = block_tokens
        self._interval_s = _LEAST_INTERVAL_S
        self.next_s = 0.0

    def add(self, time_s: float, running: Collection[Sequence], waiting: int) -> None:
        degrees = [len(list(filter(None, seq.block_ids))) for seq in running if seq.num_blocks]
        kv_tokens = self._block_tokens * sum([seq.num_blocks for seq in running])
        mean = sum(degrees) / len(degrees) if degrees else 0.0
        self.samples.append(Sample(time_s, len(running), waiting, kv_tokens, mean, max(degrees, default=0)))
        if len(self.samples) == _MOST_SAMPLES:
            del self.samples[1::2]
            self._interval_s = max(2 * (time_s - self.samples[0].time_s) / _MOST_SAMPLES, _LEAST_INTERVAL_S)
        self.next_s = time_s + self._interval_s
