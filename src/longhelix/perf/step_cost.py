"""What time steps take on one layout, fast enough to be asked many times for each step."""

from collections.abc import Callable
from functools import cached_property, lru_cache

from longhelix.perf import collectives
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import kernels
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import layer_bytes
from longhelix.perf.scalar import scalar
from longhelix.perf.setting import Setting
from longhelix.perf.step import step_seconds
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout

_KEPT = 16  # of what was asked last


class StepCost:
    """`step_seconds` of one layout for plain numbers, in microseconds; a `Cost`.

    Its steps attend in as many parts as they say. The same work is asked for in several numbers of parts, and again by
    who runs it; all but the parts is computed once. Those of none are priced as those of one KVP instance alone. local:
    every request has its KV on one rank, evenly many on each; even: all ranks have the same share of every one. Windows
    count for nothing.
    """

    def __init__(self, setting: Setting, layout: Layout, *, local: bool = False, even: bool = False) -> None:
        self._setting, self._layout = setting.as_scheduled(even=even), layout
        self._of_parts = _of_parts(self._setting, Layouts.of([layout], local=local, hop_b=False))

    def seconds(self, work: Work) -> float:
        if not work[-1]:
            return self._alone_s(work)
        return self._of_parts(*work[:-1])(work[-1])

    def _alone_s(self, work: Work) -> float:
        kvp = self._layout.kvp
        own = work._replace(
            decode_kv_tokens=work.decode_kv_tokens / kvp,
            chunk_kv_tokens=work.chunk_kv_tokens / kvp,
            chunk_pairs=work.chunk_pairs / kvp,
        )
        return self._alone_of_parts(*own[:-1])(1.0)

    @cached_property
    def _alone_of_parts(self) -> Callable[..., Callable[[float], float]]:
        """One KVP instance, which has a copy of the FFN."""
        return _of_parts(self._setting, Layouts.of([Layout(tpa=self._layout.tpa)], hop_b=False))

    def by_parts(self, work: Work) -> Callable[[float], float]:
        """Seconds of `work` in a number of parts, whatever parts it says."""
        return self._of_parts(*work[:-1])

    def swap_seconds(self, tokens: int) -> float:
        """What it takes to swap the KV of `tokens` that one rank keeps, out and in again; while others do so too, where
        ranks share a machine's disk."""
        system = self._setting.system
        sharers = self._layout.world_size if system.shared else 1
        return 2 * tokens * self._token_bytes * sharers / system.swap_bytes_per_s

    def move_seconds(self, sent_blocks: int, received_blocks: int, block_tokens: int) -> float:
        """What it takes to move KV blocks between KVP ranks, of which none sends more than `sent_blocks` or receives
        more than `received_blocks`: read one by one in each layer, sent in one all-to-all, written one by one."""
        layout, layouts = self._layout, Layouts.of([self._layout])
        block_bytes, blocks = block_tokens * self._token_bytes, sent_blocks + received_blocks
        pieces = layouts.stage_layers(self._setting.model.num_layers)
        # A copy reads and writes.
        copies = kernels("moves", self._setting, layouts, hbm_bytes=2 * blocks * block_bytes, count=blocks * pieces)
        # An all-to-all leaves a rank its own share.
        travels = max(sent_blocks, received_blocks) * block_bytes * layout.kvp / (layout.kvp - 1)
        groups = RankGroups(layouts.kvp, layouts.tpa)
        sent = collectives.all_to_all(self._setting.system, groups, layouts.ones * travels)
        return float(copies.seconds[0] + sent.seconds[0])

    @cached_property
    def _token_bytes(self) -> float:
        """Of a token's KV on a rank that keeps it, in all layers of a stage."""
        return sum(float(each[0]) for each in layer_bytes(self._setting, Layouts.of([self._layout])))


def _of_parts(setting: Setting, layouts: Layouts) -> Callable[..., Callable[[float], float]]:
    """Seconds of the numbers of a step's work, in as many parts as are asked for after that."""
    *others, parts = Work._fields
    return lru_cache(_KEPT)(scalar(lambda numbers: step_seconds(setting, layouts, Work(*numbers)), others, parts))
