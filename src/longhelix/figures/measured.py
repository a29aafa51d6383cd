"""Compare the gains of Helix that TensorRT-LLM measured on GB300 NVL72 with planned gains for the preset gb300."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from longhelix.figures.claims import Table
from longhelix.figures.frontiers import CONTEXT, MAX_GPUS
from longhelix.perf.setting import Setting
from longhelix.plan.answer import TTL_BUDGETS_S
from longhelix.plan.pareto import Gain, gain
from longhelix.plan.service import ServiceLoad
from longhelix.plan.space import HELIX, STRATEGIES, Space, space
from longhelix.plan.sweep import full_sweep, sweep
from longhelix.spec import HardwareSpec

PUBLISHED = (1.8, 32.0)  # gains in interactivity and in concurrency
_RACK = 72  # number of GPUs of an NVL72
_MOST_BATCH = 4096
_FITTED = ("kernel_s", "collective_s", "step_s", "part_fixed_share")
_NAMES = np.array([strategy.name for strategy in STRATEGIES])


@dataclass(frozen=True)
class _Case:
    """One set of assumptions, for which the planner computes the gains of Helix."""

    assumption: str  # description of the assumptions, for the table row
    setting: Setting
    max_gpus: int = MAX_GPUS
    node_gpus: int | None = None  # GPUs per server, which limits the shapes of layouts; None for no limit
    coarse: bool = False  # True to evaluate only numbers of GPUs and batch sizes that are powers of two
    ours: tuple[str, ...] = ("helix_exposed",)  # strategies to compare with the baseline
    baseline: tuple[str, ...] = field(default=tuple(name for name in _NAMES if name not in HELIX))

    def gain(self) -> Gain:
        chosen = space(self.setting.model, self.max_gpus, self.node_gpus)
        if self.coarse:
            kept = np.log2(chosen.layouts.world_size) % 1 == 0
            chosen = Space(chosen.layouts.take(kept), chosen.strategy[kept])
            found = sweep(self.setting, chosen, CONTEXT, 2.0 ** np.arange(np.log2(_MOST_BATCH) + 1))
        else:
            found = full_sweep(ServiceLoad(self.setting, int(CONTEXT)), chosen, TTL_BUDGETS_S)
        names = _NAMES[chosen.strategy[found.points.layout]]
        ours, base = (found.points.take(np.isin(names, kind)) for kind in (self.ours, self.baseline))
        return gain(ours.user_tokens_per_s, ours.gpu_tokens_per_s, base.user_tokens_per_s, base.gpu_tokens_per_s)


def measured(preset: Setting, fitted: HardwareSpec) -> Table:
    """Return a table of measured and planned gains for DeepSeek-R1 in FP4 at 1M tokens.

    Args:
        preset: DeepSeek-R1 on the preset gb300.
        fitted: the system of the Helix paper. Two rows use its fixed costs.
    """
    rows: list[tuple[str | float, ...]] = [("measured", *PUBLISHED)]
    for case in _cases(preset, fitted):
        found = case.gain()
        rows.append((case.assumption, found.interactivity, found.throughput))
    return Table(
        name="measured",
        title="Gains measured on GB300 NVL72 and planned with the preset gb300 (DeepSeek-R1, FP4, 1M tokens)",
        columns=("assumption", "user gain (x)", "GPU gain (x)"),
        rows=tuple(rows),
        note=(
            "TensorRT-LLM measured up to 1.8x interactivity and 32x concurrency over conventional parallelism, on "
            "decode servers with separate prefill servers and without HOP-B (tech blog 22, NVIDIA/TensorRT-LLM, "
            "docs/source/blogs/tech_blog). The blog does not give the dtypes of attention and KV, the grid of its "
            "sweep, or the frontier points behind the two numbers. Therefore, no row has exactly the setting of the "
            "blog. No constant of the preset is fitted to the blog, and no row was chosen to match the blog. Each row "
            "after the third row changes only the named assumption of the third row. As in the paper, the gain in "
            "tokens/s/GPU at equal tokens/s/user is the measure of concurrency."
        ),
    )


def _cases(preset: Setting, fitted: HardwareSpec) -> Iterator[_Case]:
    system = preset.system
    plain = _Case("as measured, without HOP-B", preset, node_gpus=system.network.node_ranks)
    yield replace(
        plain,
        assumption="default plan: HOP-B, without --any-shape, up to 64 GPUs, NVFP4 weights and KV, attention in FP8, "
        "10% of memory reserved",
        ours=HELIX,
    )
    yield plain
    yield replace(plain, assumption="up to 72 GPUs, the whole rack", max_gpus=_RACK)
    yield replace(plain, assumption="any shape", node_gpus=None)
    yield replace(plain, assumption="powers of two for GPUs and batches, any degrees", node_gpus=None, coarse=True)
    for words, kv_dtype, attention_dtype in (
        ("attention in FP4", "nvfp4", "fp4"),
        ("attention in bfloat16", "nvfp4", "bfloat16"),
        ("KV in FP8", "fp8", None),
    ):
        changed = replace(preset, dtypes=replace(preset.dtypes, kv=kv_dtype, attention=attention_dtype))
        yield replace(plain, assumption=words, setting=changed)
    systems = {
        "no memory reserved": {"reserve_bytes": 0.0},
        "no host work": {"step_s": 0.0},
        "kernels of 4 us": {"kernel_s": 4e-6},
        "collectives of 2.5 us": {"collective_s": 2.5e-6 - system.network.scale_up.latency_s},
        "fixed costs fitted to the paper's GB200": {name: fitted.constants[name] for name in _FITTED},
    }
    for words, values in systems.items():
        changed = replace(preset, system=system.replaced(values, "assumed"))
        yield replace(plain, assumption=words, setting=changed)
        if "fitted" in words:
            yield replace(plain, assumption=f"{words}, with HOP-B", setting=changed, ours=HELIX)
    yield replace(plain, assumption="only TP with pipeline stages as the baseline", baseline=("tp",))
