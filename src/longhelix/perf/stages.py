"""Balances the layers of pipeline stages, so that the embedding and the head do not slow their stages down."""

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import step_items
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout, split

# A chunk of a prompt with some decodes: the steps that a pipeline is for.
_STEP = Work.chunk(512, 4096) + Work.decode(4, 4096)
_ENDS = {"embedding": 0, "head": -1, "sampling": -1}  # the stages of what is in no layer


def balanced(setting: Setting, layout: Layout) -> Layout:
    """Return the layout with the `stage_layers` that make the slowest stage fastest.

    The step has a chunk of 512 tokens and 4 decodes, all behind 4,096 tokens. A layout with one stage, or with its own
    `stage_layers`, does not change. All layers count the same, with dense FFNs, experts or windows.
    """
    num_layers = setting.model.num_layers
    if layout.pp == 1 or layout.stage_layers is not None:
        return layout
    ends_s, layers_s = np.zeros(layout.pp), 0.0
    one_stage = Layout(
        kvp=layout.kvp, tpa=layout.tpa, tpf=layout.tpf, ep=layout.ep, pp=1, ffn_replicas=layout.ffn_replicas
    )
    for item in step_items(setting.as_scheduled(even=True), Layouts.of([one_stage]), _STEP):
        if item.name in _ENDS:
            ends_s[_ENDS[item.name]] += item.seconds[0]
        elif item.name != "host":
            layers_s += item.seconds[0]
    counts = _moved([len(stage) for stage in split(num_layers, layout.pp)], layers_s / num_layers, ends_s)
    return Layout(
        kvp=layout.kvp,
        tpa=layout.tpa,
        tpf=layout.tpf,
        ep=layout.ep,
        pp=layout.pp,
        ffn_replicas=layout.ffn_replicas,
        stage_layers=counts,
    )


def _moved(counts: list[int], layer_s: float, ends_s: Array) -> list[int]:
    """Layers of each stage, moved one by one from the slowest to the fastest for as long as the slowest gets faster."""
    while True:
        stages_s = np.array(counts) * layer_s + ends_s
        slowest, fastest = int(stages_s.argmax()), int(stages_s.argmin())
        moved = [count - (stage == slowest) + (stage == fastest) for stage, count in enumerate(counts)]
        if min(moved) < 1 or max(np.array(moved) * layer_s + ends_s) >= stages_s[slowest]:
            return counts
        counts = moved
