"""Predicts the time of steps on one layout, fast enough for many calls per step."""

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

_KEPT = 16  # results of the last calls


class StepCost:
    """A `Cost` that computes `step_seconds` of one layout for plain numbers. A call takes microseconds.

    Steps attend in as many parts as their work says. Work without parts is priced as that of a single KVP instance.
    Schedulers try the same work with several numbers of parts, so everything that does not depend on the parts is
    computed once. Windows are ignored.

    Args:
        local: Every request has its KV on one rank, and all ranks have the same number of requests.
        even: All ranks have the same share of every request's KV.
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
        rank_work = work._replace(
            decode_kv_tokens=work.decode_kv_tokens / kvp,
            chunk_kv_tokens=work.chunk_kv_tokens / kvp,
            chunk_pairs=work.chunk_pairs / kvp,
        )
        return self._alone_of_parts(*rank_work[:-1])(1.0)

    @cached_property
    def _alone_of_parts(self) -> Callable[..., Callable[[float], float]]:
        """The seconds of a single KVP instance, which has a copy of the FFN."""
        return _of_parts(self._setting, Layouts.of([Layout(tpa=self._layout.tpa)], hop_b=False))

    def by_parts(self, work: Work) -> Callable[[float], float]:
        """Return the seconds of `work` as a function of the number of parts. `work.parts` is ignored."""
        return self._of_parts(*work[:-1])

    def swap_seconds(self, tokens: int) -> float:
        """Return the seconds to swap a rank's KV of `tokens` out and in. Ranks of one machine share its disk."""
        system = self._setting.system
        sharers = self._layout.world_size if system.shared else 1
        return 2 * tokens * self._token_bytes * sharers / system.memory.swap_bytes_per_s

    def move_seconds(self, sent_blocks: int, received_blocks: int, block_tokens: int) -> float:
        """Return the seconds to move KV blocks between KVP ranks.

        Blocks are read one by one in each layer, sent in one all-to-all, and written one by one.

        Args:
            sent_blocks: The most blocks that a rank sends.
            received_blocks: The most blocks that a rank receives.
            block_tokens: Tokens of a block.
        """
        layout, layouts = self._layout, Layouts.of([self._layout])
        block_bytes, blocks = block_tokens * self._token_bytes, sent_blocks + received_blocks
        pieces = layouts.stage_layers(self._setting.model.num_layers)
        # A copy reads and writes.
        copies = kernels("moves", self._setting, layouts, hbm_bytes=2 * blocks * block_bytes, count=blocks * pieces)
        # In an all-to-all, a rank keeps its own share.
        travels = max(sent_blocks, received_blocks) * block_bytes * layout.kvp / (layout.kvp - 1)
        groups = RankGroups(layouts.kvp, layouts.tpa)
        sent = collectives.all_to_all(self._setting.system, groups, layouts.ones * travels)
        return float(copies.seconds[0] + sent.seconds[0])

    @cached_property
    def _token_bytes(self) -> float:
        """Bytes of a token's KV on a rank that keeps it, in all layers of a stage."""
        return sum(float(group_bytes[0]) for group_bytes in layer_bytes(self._setting, Layouts.of([self._layout])))


def _of_parts(setting: Setting, layouts: Layouts) -> Callable[..., Callable[[float], float]]:
    """Return a function of the numbers of a step's work that returns its seconds as a function of the parts."""
    *others, parts = Work._fields
    return lru_cache(_KEPT)(scalar(lambda numbers: step_seconds(setting, layouts, Work(*numbers)), others, parts))
