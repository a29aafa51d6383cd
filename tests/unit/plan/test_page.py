"""The planner's page and its plots: every number is the performance model's, and nothing is loaded from elsewhere."""

import io
import re
import sys

import numpy as np
import pytest
from rich.console import Console

from longhelix import Layout, UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import memory
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_items, decode_seconds
from longhelix.plan import plots, terminal
from longhelix.plan.page import write_page
from longhelix.plan.page_data import MOST_DRAWN, MOST_POINTS, Asked, gpu_caps, kind_of, page_data
from longhelix.plan.space import OVERLAPPED, STRATEGIES, space
from longhelix.plan.sweep import batches, sweep
from longhelix.presets import load_model, load_system, model_names

pytestmark = pytest.mark.unit

GB200, LLAMA = load_system("gb200"), load_model("llama-3.1-405b")
ASKED = Asked(16, 1e6, "fp4", "fp8", 0.03)
NAMES = [strategy.name for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def data():
    return page_data(LLAMA, "llama-3.1-405b", GB200, ASKED)


@pytest.fixture(scope="module")
def tables(data):
    """Rows by name, of every table."""
    document, start, found = data.document, 0, {}
    items = [f"{row} {item['name']}" for row in document["item_rows"] for item in document["items"]]
    rows = [*document["rows"], *items]
    for key, table in document["tables"].items():
        size = len(rows) * table["points"]
        found[key] = dict(zip(rows, data.numbers[start : start + size].reshape(len(rows), -1), strict=True))
        start += size
    assert start == len(data.numbers)
    return found


def test_there_is_a_table_for_every_choice(data):
    document = data.document
    assert document["weight_dtypes"] == document["kv_dtypes"] == ["fp4", "fp8", "bfloat16"]
    assert document["gpu_caps"] == [1, 2, 4, 8, 16]
    assert len(document["tables"]) == 9 * len(document["contexts"])
    assert all(len(table["frontiers"]) == 5 for table in document["tables"].values())


@pytest.mark.parametrize(
    "choice", [(1e6, "fp4", "fp8"), (65536.0, "bfloat16", "fp4"), (4e6, "fp8", "bfloat16")], ids=str
)
def test_a_points_numbers_are_the_performance_models(data, tables, choice):
    context, weight_dtype, kv_dtype = choice
    setting = Setting(LLAMA, GB200, weight_dtype, kv_dtype)
    key = f"{context:.0f} {weight_dtype} {kv_dtype}"
    for strategy, points in enumerate(data.document["tables"][key]["frontiers"][-1]):
        for point in points[::7]:
            row = {name: numbers[point] for name, numbers in tables[key].items()}
            assert row["strategy"] == strategy
            dp, kvp, *others = (int(row[name]) for name in ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas"))
            layouts = Layouts.of([Layout(dp * kvp, *others)], dp=dp, hop_b=NAMES[strategy] in OVERLAPPED)
            batch = float(row["batch"])
            assert row["ttl_s"] == pytest.approx(decode_seconds(setting, layouts, batch, context)[0], rel=1e-6)
            assert row["kv_bytes"] == pytest.approx(memory(setting, layouts, batch, context).kv_bytes[0], rel=2e-4)
            for item in decode_items(setting, layouts, batch, context):
                for measure in data.document["item_rows"]:
                    expected = getattr(item, measure)[0]
                    assert row[f"{measure} {item.name}"] == pytest.approx(expected, rel=2e-4), item.name


def test_what_is_asked_for_keeps_the_best_at_every_speed(data, tables):
    points = sweep(Setting(LLAMA, GB200, "fp4", "fp8"), space(LLAMA, 16), 1e6, batches()).points
    table, lines = tables["1000000 fp4 fp8"], data.document["tables"]["1000000 fp4 fp8"]["frontiers"][-1]
    kept = [point for line in lines for point in line]
    gpu = table["batch"] / table["ttl_s"] / (table["dp"] * table["kvp"] * table["tpa"] * table["pp"])
    for ttl_s in np.geomspace(points.ttl_s.min() * 1.001, points.ttl_s.max(), 20):
        best = points.gpu_tokens_per_s[points.ttl_s <= ttl_s].max()
        assert max(gpu[point] for point in kept if table["ttl_s"][point] <= ttl_s) == pytest.approx(best, rel=1e-5)


def test_other_frontiers_are_thinned_and_end_where_they_did(data, tables):
    for key, table in data.document["tables"].items():
        if key == "1000000 fp4 fp8":
            continue
        for line in table["frontiers"][-1]:
            assert len(line) <= MOST_POINTS
            assert (np.diff(tables[key]["ttl_s"][line]) < 0).all()


def test_a_cap_is_kept(data, tables):
    for key, table in data.document["tables"].items():
        gpus = tables[key]["dp"] * tables[key]["kvp"] * tables[key]["tpa"] * tables[key]["pp"]
        for cap, lines in zip(data.document["gpu_caps"], table["frontiers"], strict=True):
            assert all(gpus[point] <= cap for line in lines for point in line)
            assert (table["short_bytes"][data.document["gpu_caps"].index(cap)] > 0) == (not any(lines))


def test_caps_are_powers_of_two_and_the_most():
    assert gpu_caps(1) == [1]
    assert gpu_caps(64) == [1, 2, 4, 8, 16, 32, 64]
    assert gpu_caps(72) == [1, 2, 4, 8, 16, 32, 64, 72]


@pytest.mark.parametrize("name", model_names())
def test_every_part_has_a_kind(name):
    setting = Setting(load_model(name), GB200, "fp4", "fp4", "fp4")
    layouts = Layouts.of([Layout(kvp=2)])
    assert all(kind_of(item.name) for item in decode_items(setting, layouts, 1.0, 4096.0))


def test_owners_are_the_layouts(data):
    owners = data.document["owners"]["1 2 8 16 1 1"]
    assert len(owners) == 16
    assert dict(zip(data.document["owner_rows"], owners[9], strict=True)) == {
        "kvp_rank": 1, "tpa_rank": 1, "tpf_rank": 9, "ep_rank": 0, "kv_heads": [1, 1], "query_heads": [16, 31],
        "merged_query_heads": [24, 31], "experts": [0, 0],
    }  # fmt: skip


def test_ranks_of_a_group_merge_heads_among_themselves(data):
    """Groups of 2 KVP x 2 TPA ranks: a rank merges half of the 64 heads of its TPA share, in every group the same."""
    owners = [
        dict(zip(data.document["owner_rows"], owned, strict=True)) for owned in data.document["owners"]["2 2 2 8 1 1"]
    ]
    merged = [owned["merged_query_heads"] for owned in owners]
    assert merged == [[0, 31], [64, 95], [32, 63], [96, 127]] * 2
    assert [owned["kvp_rank"] for owned in owners] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [owned["tpf_rank"] for owned in owners] == list(range(8))


def test_without_a_target_the_page_opens_at_a_balance(tables):
    document = page_data(LLAMA, "", GB200, Asked(16, 1e6, "fp4", "fp8", None)).document
    ttl_s = tables["1000000 fp4 fp8"]["ttl_s"]
    assert ttl_s.min() < document["asked"]["ttl_s"] < ttl_s.max()


def test_nothing_fits_and_the_page_says_what_is_short(tmp_path):
    document = page_data(LLAMA, "", GB200, Asked(1, 4e6, "bfloat16", "bfloat16", None)).document
    table = document["tables"]["4000000 bfloat16 bfloat16"]
    assert table["points"] == 0
    assert table["short_bytes"][0] > 2e12


def test_large_worlds_are_planned_and_not_drawn():
    document = page_data(
        load_model("llama-3-8b"), "", load_system("a100"), Asked(160, 1e6, "bfloat16", "bfloat16", None)
    )
    kvp, tpa = np.array([stage.split()[:2] for stage in document.document["owners"]], dtype=int).T
    assert (kvp * tpa).max() <= MOST_DRAWN


def _write(folder, model, max_gpus):
    path = folder / "plan.html"
    write_page(
        path, load_model(model), model, GB200,
        max_gpus=max_gpus, context=1e6, weight_dtype="fp4", kv_dtype="fp4", ttl_s=0.02,
    )  # fmt: skip
    return path.read_text(encoding="utf-8")


def _own(page):
    """The page without plotly's script."""
    plotly = pytest.importorskip("plotly.offline", reason="needs plotly, of the extra plan")
    assert page.count(plotly.get_plotlyjs()) == 1
    return page.replace(plotly.get_plotlyjs(), "")


def test_the_page_loads_nothing(tmp_path):
    pytest.importorskip("plotly", reason="needs plotly, of the extra plan")
    own = _own(_write(tmp_path, "llama-3-8b", 8))
    assert "default-src 'none'" in own
    for loading in ("https?://", r"\bsrc\s*=", r"\bhref\s*=", r"fetch\(", "XMLHttpRequest", "@import", r"url\(", "{{"):
        assert not re.search(loading, own), loading


@pytest.mark.slow
def test_the_pages_data_is_small(tmp_path):
    pytest.importorskip("plotly", reason="needs plotly, of the extra plan")
    assert len(_own(_write(tmp_path, "deepseek-r1", 64))) < 3e6


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'longhelix\[plan\]'"):
        _write(tmp_path, "llama-3-8b", 8)


def test_a_folder_that_is_missing_is_named(tmp_path):
    pytest.importorskip("plotly", reason="needs plotly, of the extra plan")
    with pytest.raises(UserError, match=r"elsewhere.plan\.html cannot be written"):
        _write(tmp_path / "elsewhere", "llama-3-8b", 8)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'longhelix\[plan\]'"):
        plots.draw_frontier(tmp_path / "frontier", {}, "")


SERIES = {
    "TP": (np.array([10.0, 50.0, 100.0]), np.array([40.0, 20.0, 1.0])),
    "Helix": (np.array([20.0, 200.0]), np.array([80.0, 4.0])),
}


def test_plots_are_written_as_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra plan")
    png, svg = plots.draw_frontier(tmp_path / "frontier", SERIES, "llama on gb200", ttl_s=0.02)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg == tmp_path / "frontier.svg"
    assert "<svg" in svg.read_text()


def test_the_terminals_plot_has_its_size_marks_and_numbers():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal.draw_frontier(SERIES, ttl_s=0.02))
    lines = console.export_text().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    plot = "\n".join(lines[1:-3])
    assert plot.count("|") > 5
    assert plot.startswith(" " * 8)
    assert {"t", "H"} <= set(plot)
    assert {"10", "20", "50", "100", "200"} <= set(lines[-2].split())
    assert lines[-1].split() == ["t", "TP", "H", "Helix"]


def test_the_terminals_plot_of_one_point_and_of_none():
    assert "H" in terminal.draw_frontier({"Helix": (np.array([3.0]), np.array([4.0]))}).plain
    assert "no configuration" in terminal.draw_frontier({}).plain
