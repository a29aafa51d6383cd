"""Draw pipeline schedules as bars over time, for Figure 3 of Helix and Figure 9 of Medha."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]  # start and length


@dataclass(frozen=True)
class SpanRows:
    """One schedule. The n-th spans of all rows belong to the same request or chunk, and have the same colour."""

    title: str
    rows: Sequence[tuple[str, Sequence[Span]]]  # name and spans of each row, from top to bottom

    @property
    def end(self) -> float:
        return max(start + length for _, spans in self.rows for start, length in spans)


@dataclass(frozen=True)
class Bars:
    """A drawing of several schedules, one below the other, with a common time axis."""

    name: str  # file name, without a suffix
    title: str
    unit: str  # unit of time
    pipelines: Sequence[SpanRows]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        return 9.0, 0.9 + sum(0.7 + 0.4 * len(pipeline.rows) for pipeline in self.pipelines)

    def draw(self, figure: Any) -> None:
        heights = [len(pipeline.rows) for pipeline in self.pipelines]
        all_axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for pipeline, axes in zip(self.pipelines, all_axes, strict=True):
            _draw(pipeline, axes)
        all_axes[-1].set_xlabel(self.unit)


def _draw(pipeline: SpanRows, axes: Any) -> None:
    for row, (_, spans) in enumerate(pipeline.rows):
        colors = [f"C{index % 10}" for index in range(len(spans))]
        axes.broken_barh(list(spans), (row - 0.4, 0.8), facecolors=colors, edgecolor="white")
        for index, (start, length) in enumerate(spans):
            axes.text(
                start + length / 2, row, str(index + 1), ha="center", va="center", color="white", fontsize="small"
            )
    axes.axvline(pipeline.end, color="gray", linestyle=":")
    axes.set_yticks(range(len(pipeline.rows)), [name for name, _ in pipeline.rows])
    axes.set_ylim(len(pipeline.rows) - 0.5, -0.5)
    axes.set_title(f"{pipeline.title}: {pipeline.end:.3g}", fontsize="medium", loc="left")


def one_by_one(tasks: Sequence[tuple[str, float]]) -> list[tuple[str, list[Span]]]:
    """Schedule tasks one after another. Each task has a row and a length. Returns the spans of each row."""
    rows: dict[str, list[Span]] = {}
    now = 0.0
    for row, length in tasks:
        rows.setdefault(row, []).append((now, length))
        now += length
    return list(rows.items())


def overlapped(parts: int, attention: float, exchange: float) -> list[tuple[str, list[Span]]]:
    """Schedule attention in parts, and each part's exchange as early as possible. Returns the spans of each row."""
    attended = [(part * attention, attention) for part in range(parts)]
    sent: list[Span] = []
    for start, length in attended:
        free = sum(sent[-1]) if sent else 0.0
        sent.append((max(start + length, free), exchange))
    return [("attention", attended), ("exchange", sent)]


def standard_schedule(chunks_s: Sequence[float], stages: int) -> list[list[Span]]:
    """Return the spans of each stage if each chunk starts when the previous chunk leaves the last stage.

    Each chunk spends the same time in all stages.
    """
    return _schedule(chunks_s, stages, dense=False)


def sequence_schedule(chunks_s: Sequence[float], stages: int) -> list[list[Span]]:
    """Return the spans of each stage if each chunk starts when the previous chunk leaves the first stage (SPP)."""
    return _schedule(chunks_s, stages, dense=True)


def _schedule(chunks_s: Sequence[float], stages: int, *, dense: bool) -> list[list[Span]]:
    free = [0.0] * stages
    spans: list[list[Span]] = [[] for _ in range(stages)]
    for chunk_s in chunks_s:
        ready = free[0] if dense else free[-1]
        for stage in range(stages):
            start = max(ready, free[stage])
            ready = free[stage] = start + chunk_s / stages
            spans[stage].append((start, chunk_s / stages))
    return spans
