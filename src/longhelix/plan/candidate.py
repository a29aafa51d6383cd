"""Candidate configurations of a plan, and descriptions of layouts in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longhelix.perf.layouts import Layouts
from longhelix.plan.space import STRATEGIES, Space
from longhelix.plan.sweep import Points
from longhelix.spec.layout import Layout

_DEGREES = ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")


@dataclass(frozen=True)
class Candidate:
    """A layout with a batch size, and the predicted decode speed."""

    strategy: str
    layout: dict[str, int | str]  # layout as returned by `degrees`
    gpus: int
    batch: int  # number of requests on all GPUs together
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float
    memory_bytes_per_gpu: int  # memory use of the fullest GPU

    @property
    def ttl_s(self) -> float:
        return 1 / self.tokens_per_s_per_user


def candidates(space: Space, points: Points) -> list[Candidate]:
    return list(_candidates(space, points))


def _candidates(space: Space, points: Points) -> Iterator[Candidate]:
    for position, index in enumerate(points.layout):
        yield Candidate(
            strategy=STRATEGIES[space.strategy[index]].name,
            layout=degrees(space.layouts, int(index)),
            gpus=int(points.gpus[position]),
            batch=int(points.batch[position]),
            tokens_per_s_per_user=float(points.user_tokens_per_s[position]),
            tokens_per_s_per_gpu=float(points.gpu_tokens_per_s[position]),
            memory_bytes_per_gpu=int(points.memory_bytes[position]),
        )


def degrees(layouts: Layouts, index: int) -> dict[str, int | str]:
    """Return the parallel degrees of one of a layout's `dp` groups, under the names of `Layout`, and the KV placement.

    Each group serves its own requests. If each group has one KVP rank, the result follows the convention of `Layout`:
    the groups are KVP ranks with placement "local".
    """
    found: dict[str, int | str] = {name: int(getattr(layouts, name)[index]) for name in _DEGREES}
    local = found["dp"] != 1 and found["kvp"] == 1
    if local:
        found |= {"dp": 1, "kvp": found["dp"]}
    return found | {"placement": "local" if local else "striped"}


def as_layouts(layout: Mapping[str, int | str], *, hop_b: bool) -> Layouts:
    """Convert the result of `degrees` back to `Layouts` of length 1."""
    dp, kvp, tpa, tpf, ep, pp, ffn_replicas = (int(layout[name]) for name in _DEGREES)
    one = Layout(kvp=dp * kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp, ffn_replicas=ffn_replicas)
    return Layouts.of([one], dp=dp, local=layout["placement"] == "local", hop_b=hop_b)


def drafts_in_words(draft_tokens: int, accepted_tokens: float) -> str:
    """Describe how many tokens per step the plan assumes with draft tokens."""
    return f"assumes {accepted_tokens:g} tokens per step ({draft_tokens} drafted)"


def in_words(layout: Mapping[str, int | str]) -> str:
    """Describe a layout in words, such as "KVP 8 x TPA 8, TPF 64". Omits DP, EP, copies and PP if they are 1."""
    attention = f"KVP {layout['kvp']} x TPA {layout['tpa']}"
    if layout["placement"] == "local":
        attention = f"DP {layout['kvp']} x TPA {layout['tpa']}"
    elif layout["dp"] != 1:
        attention = f"DP {layout['dp']} x {attention}"
    ffn = f"TPF {layout['tpf']}" + (f" x EP {layout['ep']}" if layout["ep"] != 1 else "")
    if layout["ffn_replicas"] != 1:
        ffn += f", {layout['ffn_replicas']} copies"
    return f"{attention}, {ffn}" + (f", PP {layout['pp']}" if layout["pp"] != 1 else "")
