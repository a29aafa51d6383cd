"""In how many parts each step attends (HOP-B), chosen here for all ranks: they would hang if they disagreed."""

from dataclasses import replace

from longhelix.engine.config import EngineConfig
from longhelix.perf.attention import overlap
from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.work import Work
from longhelix.request import PART_ROWS, Step
from longhelix.spec import HardwareSpec

# What a part costs a rank's thread on CPUs beside its kernels: to be cut, packed, started and merged, from Python.
# Measured: 84 us, of eight rows of 32 heads, on one thread of the machine that the preset `cpu` stands for.
_PART_S = 84e-6


class Parts:
    """The parts of steps. `overlaps`: whether what ranks send travels while they compute.

    As many as `config.hop_b` allows and the batch can be cut into, or, where it is None, as many of these as take the
    fewest seconds by the cost model: 1 where a second exchange does not pay.
    """

    def __init__(self, config: EngineConfig, overlaps: bool) -> None:
        self._limit = config.hop_b
        # The compiler sees one exchange. CUDA graphs pad a chunk with a sequence, and two sequences are not cut.
        self._overlaps = overlaps and config.execution != "compiled"
        self._cuts_chunks = config.device == "cpu" or config.execution == "eager"
        self._setting = Setting(config.spec, _system(config), config.weight_dtype, config.kv_dtype)
        self._layouts = Layouts.of([config.layout])
        self._part_s = _PART_S if config.device == "cpu" else 0.0

    def of(self, step: Step, work: Work) -> int:
        """In how many parts `step`, which computes `work`, attends, 1 or more."""
        if not self._overlaps:
            return 1
        most = self._most(step)
        if self._limit is not None:
            return min(self._limit, most)
        return self._cheapest(work, most) if most > 1 else 1

    def _most(self, step: Step) -> int:
        """What `Batch.cut` can cut: sequences with one row each, or one sequence's rows."""
        rows = [piece.num_tokens for piece in step.work]
        if not rows:
            return 1
        if max(rows) == 1:
            return len(rows)
        return max(1, rows[0] // PART_ROWS) if len(rows) == 1 and self._cuts_chunks else 1

    def _cheapest(self, work: Work, most: int) -> int:
        cut = overlap(self._setting, self._layouts, work)
        attention_s, fixed_s = cut.attention_s + self._part_s, cut.attention_fixed_s + self._part_s
        cut = replace(cut, attention_s=attention_s, attention_fixed_s=fixed_s)
        return int(cut.best_parts(float(most))[0])


def _system(config: EngineConfig) -> HardwareSpec:
    """The engine's machine as its exchange meets it."""
    system = config.system.replaced({"part_fixed_share": 1.0}, "each part is a collective of its own")
    if config.device == "cpu":  # ranks overlap where they do not share memory: as hosts do
        system = system.replaced({"scale_up.ranks": 1}, "ranks that do not share memory")
    return system
