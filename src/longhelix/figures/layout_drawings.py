"""Draw Figures 2 and 4 of Helix from a `Layout`: the keys on each GPU, and the work of each rank in a layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longhelix.spec.layout import HeadShape, Layout, piece_of

_TOKENS = 8  # number of KV blocks drawn along the sequence


@dataclass(frozen=True)
class HeadsDrawing:
    """A drawing with one column per layout. It shows the KV blocks and query heads of each GPU."""

    name: str  # file name, without a suffix
    title: str
    heads: HeadShape
    layouts: Sequence[Layout]

    @property
    def size(self) -> tuple[float, float]:
        return 3.2 * len(self.layouts), 1.2 + 1.1 * max(layout.num_ranks for layout in self.layouts)

    def draw(self, figure: Any) -> None:
        rows = max(layout.num_ranks for layout in self.layouts)
        grid = figure.subplots(rows, len(self.layouts), squeeze=False)
        for column, layout in enumerate(self.layouts):
            for rank in range(rows):
                if rank < layout.num_ranks:
                    self._draw_rank(grid[rank][column], layout, rank)
                else:
                    grid[rank][column].set_axis_off()
            grid[0][column].set_title(f"{_name(layout, self.heads)}\nGPU 0", fontsize="medium")

    def _draw_rank(self, axes: Any, layout: Layout, rank: int) -> None:
        kept, tokens = layout.kv_heads(self.heads, rank), piece_of(_TOKENS, layout.kvp, layout.kvp_rank(rank))
        for head in range(self.heads.num_kv_heads):
            for token in range(_TOKENS):
                color = f"C{head}" if head in kept and token in tokens else "#eeeeee"
                axes.broken_barh([(token, 0.9)], (head - 0.4, 0.8), facecolors=color)
        axes.set_yticks(range(self.heads.num_kv_heads), [f"KV {head}" for head in range(self.heads.num_kv_heads)])
        axes.set_ylim(self.heads.num_kv_heads - 0.5, -0.5)
        axes.set_xticks([])
        axes.set_frame_on(False)
        axes.set_title(f"GPU {rank}", fontsize="medium")
        axes.set_xlabel(f"queries {_span(layout.query_heads(self.heads, rank))}")


@dataclass(frozen=True)
class PhasesDrawing:
    """A drawing of one layer as a grid, with a column per phase and a row per rank.

    Each cell shows the work of the rank in the phase.
    """

    name: str  # file name, without a suffix
    title: str
    heads: HeadShape
    ffn_size: int  # number of columns of the FFN
    dense: Layout  # layout of the upper grid, for a dense FFN
    sparse: Layout  # layout of the lower grid, for an FFN with one expert per EP rank

    @property
    def size(self) -> tuple[float, float]:
        return 13.0, 2.0 + 0.9 * (self.dense.num_ranks + self.sparse.num_ranks)

    def draw(self, figure: Any) -> None:
        top, bottom = figure.subplots(2, 1)
        self._draw_layer(top, self.dense, f"dense FFN, TPF {self.dense.tpf}")
        self._draw_layer(bottom, self.sparse, f"experts, TPF {self.sparse.tpf} x EP {self.sparse.ep}")

    def phases(self, layout: Layout, rank: int) -> list[tuple[str, str]]:
        """Return the phases of a layer in order, each with the work of the rank. Collectives list their ranks."""
        heads, columns = self.heads, _span(layout.ffn_columns(self.ffn_size, rank))
        queries, keys = layout.query_heads(heads, rank), layout.kv_heads(heads, rank)
        tokens = piece_of(_TOKENS, layout.kvp, layout.kvp_rank(rank))
        merged = layout.merged_query_heads(heads, rank)
        phases = [
            ("QKV", f"all rows\nQ {_span(queries)}, KV {_span(keys)}"),
            ("attention", f"Q {_span(queries)} over\nparts {_span(tokens)} of S"),
            ("all-to-all", f"with ranks\n{_group(layout.kvp_groups(), rank)}"),
            ("merge, Wo", f"heads {_span(merged)}\nrows of Wo"),
            ("all-reduce", f"ranks {_group(layout.stage_groups(), rank)}"),
        ]
        if layout.ep == 1:
            return [
                *phases,
                ("FFN", f"columns\n{columns}"),
                ("all-reduce ", f"ranks {_group(layout.stage_groups(), rank)}"),
            ]
        peers = tuple(other for other in range(layout.num_ranks) if layout.ep_rank(other) == layout.ep_rank(rank))
        return [
            *phases,
            ("experts", f"expert {_span(layout.experts(layout.ep, rank))}\ncolumns {columns}"),
            ("all-reduce ", f"ranks {_list(peers)}"),
            ("all-gather, sum", f"ranks {_group(layout.stage_groups(), rank)}"),
        ]

    def _draw_layer(self, axes: Any, layout: Layout, title: str) -> None:
        for rank in range(layout.num_ranks):
            phases = self.phases(layout, rank)
            for column, (phase, owned) in enumerate(phases):
                sends = phase.startswith("all")
                color = "#dddddd" if sends else f"C{rank}"
                axes.broken_barh([(column, 0.96)], (rank - 0.46, 0.92), facecolors=color, alpha=1.0 if sends else 0.35)
                axes.text(column + 0.48, rank, owned, ha="center", va="center", fontsize="small")
        axes.set_xticks([column + 0.48 for column in range(len(phases))], [phase for phase, _ in phases])
        axes.xaxis.tick_top()
        axes.set_yticks(range(layout.num_ranks), [f"GPU {rank}" for rank in range(layout.num_ranks)])
        axes.set_ylim(layout.num_ranks - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.set_frame_on(False)
        axes.set_title(title, loc="left", fontsize="medium")


def _name(layout: Layout, heads: HeadShape) -> str:
    if layout.kvp > 1:
        return f"Helix: TPA {layout.tpa} x KVP {layout.kvp}"
    if layout.tpa == 1:
        return "no TP"
    return f"TP {layout.tpa}" + (", KV duplicated" if layout.duplicates_kv(heads) else "")


def _span(items: range) -> str:
    return f"{items.start}" if len(items) == 1 else f"{items.start}-{items.stop - 1}"


def _group(groups: Sequence[Sequence[int]], rank: int) -> str:
    return _list(next(group for group in groups if rank in group))


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
