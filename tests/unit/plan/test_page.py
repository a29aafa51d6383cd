"""The planner's page and its plots: every number is the performance model's, and nothing is loaded from elsewhere."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import longhelix
from longhelix import Layout, UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.perf.step import decode_items
from longhelix.plan import page_data as page_data_module
from longhelix.plan import plots, report, terminal
from longhelix.plan.answer import answer
from longhelix.plan.candidate import as_layouts
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.page import write_page
from longhelix.plan.page_data import MOST_POINTS, gpu_caps, kind_of, page_data
from longhelix.plan.question import Question
from longhelix.plan.service import CHUNKS, ServiceLoad, mixed_seconds, prompts, service
from longhelix.plan.space import OVERLAPPED, STRATEGIES
from longhelix.spec.presets import load_model, load_system, model_names

pytestmark = pytest.mark.unit

GB200, LLAMA = load_system("gb200"), load_model("llama-3.1-405b")
ASKED = Question(Setting(LLAMA, GB200, Dtypes("fp4", "fp8")), 1_000_000, 16, ttl_s=0.03, ttft_s=300.0)
SMALL = Setting(load_model("llama-3-8b"), GB200, Dtypes("fp8", "fp8"))
DEMAND = Demand((Kind(0.9, 20_000, 500), Kind(0.1, 400_000, 200)), prefix_hit=0.5)
DEMANDED = replace(ASKED, context=DEMAND.longest, demand=DEMAND, gpu_hour=3.0)


@pytest.fixture(scope="module")
def plan():
    return answer(ASKED)


@pytest.fixture(scope="module")
def demanded():
    return answer(DEMANDED)


class Tables:
    """What a page has, read as its script does: for each table the rows of points and configurations, by name."""

    def __init__(self, plan):
        data = page_data(plan, "", {})
        self.document = document = json.loads(json.dumps(data.document))
        items = [f"{row} {item['name']}" for row in document["item_rows"] for item in document["items"]]
        self.points, self.configurations, self.start, self.numbers = [], [], 0, data.numbers
        for table in document["tables"]:
            self.points.append(self._rows([*document["point_rows"], *items], table["points"]))
            self.configurations.append(self._rows(document["configuration_rows"], table["configurations"]))
        assert self.start == len(data.numbers)

    def _rows(self, names, count):
        size = len(names) * count
        part = self.numbers[self.start : self.start + size].reshape(len(names), -1)
        self.start += size
        return dict(zip(names, part, strict=True))

    def index(self, length, dtypes):
        return dtypes * len(self.document["lengths"]) + self.document["lengths"].index(length)

    def layout(self, table, point):
        return self.document["layouts"][int(self.points[table]["layout"][point])]

    def layouts(self, table, points):
        """Of several points, one of `Layouts` each."""
        return [_layouts(self.layout(table, int(point))) for point in points]


def _layouts(layout):
    return as_layouts(layout, hop_b=STRATEGIES[layout["strategy"]].name in OVERLAPPED)


@pytest.fixture(scope="module")
def tables(plan):
    return Tables(plan)


@pytest.fixture(scope="module")
def demanded_tables(demanded):
    return Tables(demanded)


def test_there_is_a_table_for_every_choice(tables):
    document = tables.document
    assert document["lengths"] == [62_500, 250_000, 1_000_000, 4_000_000]
    assert document["dtypes"] == [["fp4", "fp8"], ["fp8", "fp8"], ["bfloat16", "bfloat16"]]
    assert document["gpu_caps"] == [1, 2, 4, 8, 16]
    assert len(document["tables"]) == 12
    assert all(len(table["frontiers"]) == 5 for table in document["tables"])
    assert document["asked"]["length"] == 2


@pytest.mark.parametrize(("context", "dtypes"), [(1_000_000, 0), (62_500, 2), (4_000_000, 1)])
def test_a_points_numbers_are_the_performance_models(tables, context, dtypes):
    setting = Setting(LLAMA, GB200, Dtypes(*tables.document["dtypes"][dtypes]))
    table, use = tables.index(context, dtypes), ServiceLoad(setting, context)
    rows = tables.points[table]
    points = np.arange(0, len(rows["batch"]), 23)
    for point, layouts in zip(points, tables.layouts(table, points), strict=True):
        batch = float(rows["batch"][point])
        items = decode_items(setting, layouts, batch, float(context))
        assert rows["ttl_s"][point] == pytest.approx(sum(item.seconds[0] for item in items), rel=1e-6)
        held = use.memory(layouts, batch, 0.0)
        assert rows["kv_bytes"][point] == pytest.approx(held.kv_bytes[0], rel=4e-4)
        assert rows["weights_bytes"][point] == pytest.approx(held.weights_bytes[0], rel=4e-4)
        for item in items:
            for measure in tables.document["item_rows"]:
                assert rows[f"{measure} {item.name}"][point] == pytest.approx(getattr(item, measure)[0], rel=4e-4)


@pytest.mark.parametrize("which", ["tables", "demanded_tables"])
def test_a_configurations_numbers_are_the_performance_models(which, request):
    found = request.getfixturevalue(which)
    asked = ASKED if which == "tables" else DEMANDED
    use = ServiceLoad(asked.setting, asked.context, asked.demand, asked.ttft_s)
    table = found.index(asked.context, 0)
    rows, points = found.configurations[table], found.points[table]
    assert set(rows["chunk"]) == set(CHUNKS)
    for index in range(0, len(rows["chunk"]), 97):
        point = int(rows["point"][index])
        layouts = _layouts(found.layout(table, point))
        batch, chunk = (np.array([float(row)]) for row in (points["batch"][point], rows["chunk"][index]))
        decodes = use.decodes(layouts, batch)
        expected = prompts(use, layouts, chunk, decodes)
        assert points["ttl_s"][point] == pytest.approx(use.token_seconds(layouts, batch)[0], rel=1e-6)
        assert rows["ttl_p95_s"][index] == pytest.approx(mixed_seconds(use, layouts, batch, chunk)[0], rel=1e-6)
        assert rows["longest_s"][index] == pytest.approx(expected.longest_s[0], rel=1e-6)
        held = use.memory(layouts, batch, chunk)
        assert rows["activations_bytes"][index] == pytest.approx(held.activations_bytes[0], rel=1e-6)
        assert held.total_bytes[0] <= use.setting.capacity_bytes(layouts)[0]
        if asked.demand is None:
            assert rows["longest_s"][index] == pytest.approx(service(use, layouts, batch, chunk).ttft_s[0], rel=1e-6)
        else:
            assert rows["busy_s"][index] == pytest.approx(expected.busy_s[0], rel=1e-6)
            assert rows["wait_s"][index] == pytest.approx(expected.wait_s[0], rel=1e-6)


def test_what_is_asked_for_has_the_ends_of_all_frontiers_and_what_keeps_the_target(plan, tables):
    table = tables.index(1_000_000, 0)
    rows, lines = tables.points[table], tables.document["tables"][table]["frontiers"][-1]
    gpus = np.array([tables.layout(table, point)["gpus"] for point in range(len(rows["batch"]))])
    gpu = rows["batch"] / rows["ttl_s"] / gpus
    for strategy, line in zip(STRATEGIES, lines, strict=True):
        # HOP-B may gain nothing; then the two are the same.
        found = plan.strategies.get(strategy.name, plan.strategies["helix"])
        ends = [candidate.tokens_per_s_per_gpu for candidate in found[:1] + found[-1:]]
        assert [gpu[point] for point in line[:1] + line[-1:]] == pytest.approx(ends, rel=1e-5)
        within = [each.tokens_per_s_per_gpu for each in found if each.ttl_s <= 0.03]
        kept = [gpu[point] for point in line if rows["ttl_s"][point] <= 0.03 * (1 + 1e-6)]
        assert max(kept, default=0) == pytest.approx(max(within, default=0), rel=1e-5)


@pytest.mark.parametrize("which", ["plan", "demanded"])
def test_what_a_plan_names_is_among_the_configurations(which, request):
    plan = request.getfixturevalue(which)
    tables = request.getfixturevalue({"plan": "tables", "demanded": "demanded_tables"}[which])
    table = tables.index(plan.question.context, 0)
    rows, points = tables.configurations[table], tables.points[table]
    found = {
        (tuple(tables.layout(table, int(point)).items()), points["batch"][int(point)], chunk)
        for point, chunk in zip(rows["point"], rows["chunk"], strict=True)
    }
    for choice in (plan.best,) if plan.best else plan.nearest:
        strategy = [each.name for each in STRATEGIES].index(choice.strategy)
        assert any(
            batch == choice.batch
            and chunk == choice.chunk_tokens
            and dict(layout)["strategy"] == strategy
            and {name: dict(layout)[name] for name in choice.layout} == choice.layout
            for layout, batch, chunk in found
        )


def test_other_frontiers_are_thinned(tables):
    for index, (table, rows) in enumerate(zip(tables.document["tables"], tables.points, strict=True)):
        if index == tables.index(1_000_000, 0):
            continue
        for line in table["frontiers"][-1]:
            assert len(line) <= MOST_POINTS
            assert (np.diff(rows["ttl_s"][line]) < 0).all()


def test_a_cap_is_kept_and_where_nothing_fits_it_says_what_is_short(tables):
    for index, table in enumerate(tables.document["tables"]):
        for cap, lines, short in zip(
            tables.document["gpu_caps"], table["frontiers"], table["short_bytes"], strict=True
        ):
            assert all(tables.layout(index, point)["gpus"] <= cap for line in lines for point in line)
            assert (short > 0) == (not any(lines))


def test_shorter_and_longer_requests_of_a_demand_have_the_same_answers(demanded_tables):
    assert demanded_tables.document["lengths"] == [25_200, 100_200, 400_200, 1_600_200]
    use = ServiceLoad(DEMANDED.setting, 0, Demand((Kind(0.9, 5_000, 500), Kind(0.1, 100_000, 200)), prefix_hit=0.5))
    table = demanded_tables.index(100_200, 0)
    rows = demanded_tables.points[table]
    for point in range(0, len(rows["batch"]), 29):
        layouts, batch = _layouts(demanded_tables.layout(table, point)), float(rows["batch"][point])
        items = decode_items(use.setting, layouts, batch, use.kv_tokens)
        assert rows["ttl_s"][point] == pytest.approx(sum(item.seconds[0] for item in items), rel=1e-6)


def test_the_page_attends_in_the_dtype_that_is_asked_for():
    small = load_model("llama-3-8b")
    settings = [Setting(small, GB200, Dtypes("fp8", "fp8", attention)) for attention in (None, "bfloat16")]
    own, wide = (Tables(answer(Question(setting, 100_000, 4))) for setting in settings)
    assert own.points[own.index(100_000, 0)]["flops attention"].max() > 0
    for tables, setting in ((own, settings[0]), (wide, settings[1])):
        table = tables.index(100_000, 0)
        rows = tables.points[table]
        for point in range(0, len(rows["batch"]), 31):
            expected = decode_items(setting, _layouts(tables.layout(table, point)), float(rows["batch"][point]), 1e5)
            assert rows["ttl_s"][point] == pytest.approx(sum(item.seconds[0] for item in expected), rel=1e-6)


@pytest.mark.parametrize("any_shape", [False, True])
def test_shapes_are_those_that_are_asked_for(any_shape):
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    layouts = Tables(answer(Question(setting, 500_000, 6, any_shape=any_shape))).document["layouts"]
    assert any(layout["gpus"] & (layout["gpus"] - 1) for layout in layouts) == any_shape


def test_caps_are_powers_of_two_and_the_most():
    assert gpu_caps(1) == [1]
    assert gpu_caps(64) == [1, 2, 4, 8, 16, 32, 64]
    assert gpu_caps(72) == [1, 2, 4, 8, 16, 32, 64, 72]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy_has_a_colour_on_light_and_on_dark_and_a_mark(strategy):
    source = Path(longhelix.__file__).parent
    assert (source / "plan/html/assets/page.css").read_text().count(f"--{strategy.name}: #") == 2
    looks = (source / "plan/assets/frontier.js").read_text().partition("};")[0]
    mark = re.search(rf'\b{strategy.name}: "(\w+)"', looks)[1]
    assert f"  {mark}: (x, y, r) =>" in (source / "plan/assets/chart.js").read_text()


@pytest.mark.parametrize("name", model_names())
def test_every_part_has_a_kind(name):
    setting = Setting(load_model(name), GB200, Dtypes("fp4", "fp4", "fp4"))
    layouts = Layouts.of([Layout(kvp=2)])
    assert all(kind_of(item.name) for item in decode_items(setting, layouts, 1.0, 4096.0))


def test_owners_are_the_layouts(tables):
    owners = tables.document["owners"]["1 2 8 16 1 1"]
    assert len(owners) == 16
    assert dict(zip(tables.document["owner_rows"], owners[9], strict=True)) == {
        "kvp_rank": 1, "tpa_rank": 1, "tpf_rank": 9, "ep_rank": 0, "kv_heads": [1, 1], "query_heads": [16, 31],
        "merged_query_heads": [24, 31], "experts": [0, 0],
    }  # fmt: skip


def test_ranks_of_a_group_merge_heads_among_themselves(tables):
    """Groups of 2 KVP x 2 TPA ranks: a rank merges half of the 64 heads of its TPA share, in every group the same."""
    rows, owners = tables.document["owner_rows"], tables.document["owners"]["2 2 2 8 1 1"]
    owners = [dict(zip(rows, owned, strict=True)) for owned in owners]
    merged = [owned["merged_query_heads"] for owned in owners]
    assert merged == [[0, 31], [64, 95], [32, 63], [96, 127]] * 2
    assert [owned["kvp_rank"] for owned in owners] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [owned["tpf_rank"] for owned in owners] == list(range(8))


def test_stages_are_named_by_their_groups(tables):
    """Data parallel attention, which layouts tell as local KVP ranks, has other owners than Helix of the same ranks."""
    for layout in tables.document["layouts"]:
        dp, kvp = (layout["kvp"], 1) if layout["placement"] == "local" else (layout["dp"], layout["kvp"])
        others = (layout[name] for name in ("tpa", "tpf", "ep", "ffn_replicas"))
        assert layout["stage"] == " ".join(map(str, (dp, kvp, *others)))
        assert len(tables.document["owners"][layout["stage"]]) == dp * kvp * layout["tpa"]
        assert layout["gpus"] == dp * kvp * layout["tpa"] * layout["pp"]


def test_drafts_count_in_every_number_of_the_page():
    """A step verifies drafts, and gives each request more than one token: all times are of one of them."""
    drafts = replace(SMALL, drafts=Drafts(3, 2.5))
    demand = Demand((Kind(1.0, 50_000, 500),))
    question = Question(drafts, demand.longest, 4, ttl_s=0.02, demand=demand)
    tables = Tables(answer(question))
    assert tables.document["accepted_tokens"] == 2.5
    for dtypes, pair in enumerate(tables.document["dtypes"]):
        setting = replace(drafts, dtypes=Dtypes(pair[0], pair[1]))
        table, use = tables.index(demand.longest, dtypes), ServiceLoad(setting, demand.longest, demand)
        points, rows = tables.points[table], tables.configurations[table]
        assert len(points["batch"])
        for point in range(0, len(points["batch"]), 17):
            layouts, batch = _layouts(tables.layout(table, point)), float(points["batch"][point])
            items = decode_items(setting, layouts, batch, use.kv_tokens)
            step_s = sum(item.seconds[0] for item in items)
            assert points["ttl_s"][point] == pytest.approx(step_s / 2.5, rel=1e-6)
            told = sum(points[f"seconds {item.name}"][point] for item in items)
            assert told == pytest.approx(step_s / 2.5, rel=1e-3)
        for index in range(0, len(rows["chunk"]), 53):
            point = int(rows["point"][index])
            layouts = _layouts(tables.layout(table, point))
            batch, chunk = (np.array([float(row)]) for row in (points["batch"][point], rows["chunk"][index]))
            found = prompts(use, layouts, chunk, use.decodes(layouts, batch))
            step_s = layouts.pp * found.busy_s / found.chunks
            assert rows["step_s"][index] == pytest.approx(step_s[0] / 2.5, rel=1e-6)
            assert rows["busy_s"][index] == pytest.approx(found.busy_s[0], rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "kv", "experts", "expected"),
    [
        ("fp8", "bfloat16", "fp4", [("fp8", "bfloat16", "fp4"), ("fp4", "fp8", "fp4"), ("fp8", "fp8", "fp4")]),
        ("fp8", "fp8", "bfloat16", [
            ("fp8", "fp8", "bfloat16"), ("fp4", "fp8", "fp4"), ("bfloat16", "bfloat16", "bfloat16"),
        ]),
    ],
)  # fmt: skip
def test_experts_keep_their_dtype_beside_the_weights_that_they_were_asked_with(weights, kv, experts, expected):
    setting = Setting(load_model("gpt-oss-120b"), GB200, Dtypes(weights, kv, experts=experts))
    tables = Tables(answer(Question(setting, 50_000, 2)))
    pairs = zip(tables.document["dtypes"], tables.document["expert_dtypes"], strict=True)
    assert [(*pair, told) for pair, told in pairs] == expected
    for dtypes, (weights, kv, experts) in enumerate(expected):
        use = ServiceLoad(replace(setting, dtypes=Dtypes(weights, kv, experts=experts)), 50_000)
        table = tables.index(50_000, dtypes)
        rows = tables.points[table]
        for point in range(0, len(rows["batch"]), 11):
            layouts, batch = _layouts(tables.layout(table, point)), float(rows["batch"][point])
            held = use.memory(layouts, batch, 0.0)
            assert rows["weights_bytes"][point] == pytest.approx(held.weights_bytes[0], rel=4e-4)


def test_large_stages_are_planned_and_not_drawn(monkeypatch):
    monkeypatch.setattr(page_data_module, "MOST_DRAWN", 8)
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    document = Tables(answer(Question(setting, 1_000_000, 32))).document
    dp, kvp, tpa = np.array([stage.split()[:3] for stage in document["owners"]], dtype=int).T
    assert (dp * kvp * tpa).max() == 8
    assert max(layout["gpus"] // layout["pp"] for layout in document["layouts"]) > 8


def _written(folder, plan):
    path = folder / "plan.html"
    write_page(path, plan, {"model": "m"} | report.as_json(plan, 1.0, [], [], []))
    return path.read_text(encoding="utf-8")


def test_the_page_loads_nothing_and_needs_no_extra(tmp_path, monkeypatch, plan):
    monkeypatch.setitem(sys.modules, "plotly", None)
    page = _written(tmp_path, plan)
    assert "default-src 'none'" in page
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, and no address
    for loading in ("https?://", r"\bsrc\s*=", r"\bhref\s*=", r"fetch\(", "XMLHttpRequest", "@import", r"url\(", "{{"):
        assert not re.search(loading, page), loading


def test_the_page_is_small(tmp_path):
    setting = Setting(load_model("deepseek-r1"), GB200, Dtypes("fp8", "bfloat16"))
    plan = answer(Question(setting, 1_000_000, 64, ttl_s=0.02, ttft_s=60.0))
    assert len(_written(tmp_path, plan).encode()) < 2e6


def test_a_folder_that_is_missing_is_named(tmp_path, plan):
    with pytest.raises(UserError, match=r"elsewhere.plan\.html cannot be written"):
        _written(tmp_path / "elsewhere", plan)


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
