"""Record the state of a simulation over time, in constant memory."""

from collections.abc import Collection
from typing import NamedTuple

from longhelix.scheduler.sequence import Sequence

_MOST_SAMPLES = 256
_LEAST_INTERVAL_S = 0.1


class Sample(NamedTuple):
    """The state at one moment."""

    time_s: float
    running: int  # number of running requests
    waiting: int  # number of waiting requests
    kv_tokens: int  # capacity of the KV blocks of running requests, in tokens
    kvp_mean: float  # mean number of KVP ranks per request with KV
    kvp_most: int  # maximum number of KVP ranks per request with KV


class Timeline:
    """Records at most _MOST_SAMPLES samples at nearly equal intervals of at least _LEAST_INTERVAL_S.

    When the timeline is full, it drops every other sample and doubles the interval. `next_s` is the time at which the
    next sample is due.
    """

    def __init__(self, block_tokens: int) -> None:
        self.samples: list[Sample] = []
        self._block_tokens = block_tokens
        self._interval_s = _LEAST_INTERVAL_S
        self.next_s = 0.0

    def add(self, time_s: float, running: Collection[Sequence], waiting: int) -> None:
        degrees = [len(list(filter(None, seq.kv.block_ids))) for seq in running if seq.kv.num_blocks]
        kv_tokens = self._block_tokens * sum([seq.kv.num_blocks for seq in running])
        mean = sum(degrees) / len(degrees) if degrees else 0.0
        self.samples.append(
            Sample(
                time_s=time_s,
                running=len(running),
                waiting=waiting,
                kv_tokens=kv_tokens,
                kvp_mean=mean,
                kvp_most=max(degrees, default=0),
            )
        )
        if len(self.samples) == _MOST_SAMPLES:
            del self.samples[1::2]
            self._interval_s = max(2 * (time_s - self.samples[0].time_s) / _MOST_SAMPLES, _LEAST_INTERVAL_S)
        self.next_s = time_s + self._interval_s
