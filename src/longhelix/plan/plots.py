"""Plot frontiers as PNG and SVG files with matplotlib (the extra `plan`)."""

from pathlib import Path

from longhelix.errors import UserError
from longhelix.plan.pareto import Series
from longhelix.plan.space import STRATEGIES

# Colours that colour-blind readers can tell apart (Okabe and Ito), and markers that work without colour.
_STYLES = {
    "tp": ("#d55e00", "s"),
    "dp_ep": ("#009e73", "D"),
    "dp_tp": ("#8a6d00", "^"),
    "tied": ("#cc79a7", "X"),
    "helix_exposed": ("#56b4e9", "o"),
    "helix": ("#0072b2", "o"),
    "helix_dp": ("#3d3d3d", "v"),
}
# Fixed margins, because automatic layout takes as long as drawing. They leave room for tick labels such as "10,000".
_MARGINS = {"left": 0.08, "right": 0.985, "top": 0.93, "bottom": 0.11}


def draw_frontier(stem: Path, series: Series, title: str, *, ttl_s: float | None = None) -> list[Path]:
    """Plot tokens/s/GPU over tokens/s/user, with one line per strategy.

    Args:
        stem: path of the files, without a suffix.
        ttl_s: TPOT target in seconds. It is drawn as a vertical line.

    Returns:
        The paths of the files.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import StrMethodFormatter
    except ImportError as error:
        raise UserError(
            "plots need matplotlib, which is not installed: run pip install 'longhelix[plan]'", "missing_dependency"
        ) from error
    figure = Figure(figsize=(9, 5))
    axes = figure.add_subplot(title=title, xlabel="tokens/s per user", ylabel="tokens/s per GPU")
    figure.subplots_adjust(**_MARGINS)
    axes.set_xscale("log", subs=(2, 5))
    axes.set_yscale("log", subs=(2, 5))
    styles = {strategy.title: _STYLES[strategy.name] for strategy in STRATEGIES}
    for label, (user, gpu) in series.items():
        color, marker = styles[label]
        axes.plot(user, gpu, color=color, marker=marker, markersize=3, linewidth=1.5, label=label)
    if ttl_s is not None:
        axes.axvline(1 / ttl_s, color="#b3261e", linestyle="--", label=f"TPOT {1e3 * ttl_s:g} ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
