"""The papers' figures: formulas to the digit, headline numbers in their bands, and files that open."""

import importlib.util
import json
from itertools import pairwise

import pytest

from longhelix.cli.figures import _helix, _medha
from longhelix.cli.main import main
from longhelix.figures import report
from longhelix.figures.claims import TOLERANCE, Claim
from longhelix.figures.frontiers import frontiers
from longhelix.figures.layout_drawings import PhasesDrawing
from longhelix.figures.pipelines import one_by_one, overlapped, sequence_schedule, standard_schedule
from longhelix.figures.roofline import KVP_WIDTHS, WIDTHS, appendix_a
from longhelix.figures.tied import TiedDeployment, growth
from longhelix.perf.hop_b import pipelined_s
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import FORMATS
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.presets import load_model, load_system
from tiers import few
from toy_model import kv_elements

pytestmark = pytest.mark.unit

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing: the extra `plan` brings it"
)
M = 1e6


@pytest.fixture(scope="module")
def helix():
    return _helix()


@pytest.fixture(scope="module")
def medha():
    return _medha()


@pytest.fixture(scope="module")
def small(medha):
    return Setting(load_model("llama-3-8b"), medha.system, Dtypes("bfloat16", "bfloat16"))


def claim(found, figure: str, *words: str) -> Claim:
    """The one claim of a figure in which all words occur."""
    of_figure = [made for made in found.claims if made.figure == figure]
    (only,) = (made for made in of_figure if all(word in made.what + made.setting for word in words))
    return only


# Helix, Figure 1: appendix A to four digits


@pytest.mark.parametrize(
    ("tp", "kv_us", "weights_us"),
    list(
        zip(
            WIDTHS, (1024, 512, 256, 128, 128, 128, 128), (236.98, 118.49, 59.24, 29.62, 14.94, 7.60, 3.93), strict=True
        )
    ),
)
def test_figure_1_over_tp(tp, kv_us, weights_us):
    read = appendix_a(load_model("helix-figure-1"), tpa=tp, tpf=tp)
    assert read.kv_us == pytest.approx(kv_us, abs=0.005)
    assert read.weights_us == pytest.approx(weights_us, abs=0.005)


@pytest.mark.parametrize(
    ("context", "kv_us"),
    [(32768, 4.19), (131072, 16.78), (524288, 67.11), (1e6, 128.0), (2e6, 256.0), (4e6, 512.0)],
)
def test_figure_1_over_the_context(context, kv_us):
    read = appendix_a(load_model("helix-figure-1"), tpa=8, tpf=8, context=context)
    assert read.kv_us == pytest.approx(kv_us, abs=0.005)


@pytest.mark.parametrize(
    ("kvp", "kv_us", "weights_us"), list(zip(KVP_WIDTHS, (128, 64, 32, 16), (29.62, 17.04, 10.75, 7.60), strict=True))
)
def test_figure_1_over_kvp(kvp, kv_us, weights_us):
    read = appendix_a(load_model("helix-figure-1"), tpa=8, tpf=8 * kvp, kvp=kvp)
    assert (read.kv_us, read.weights_us) == pytest.approx((kv_us, weights_us), abs=0.005)


# Helix, the others


def test_figure_3():
    assert float(pipelined_s(16.0, 9.6, 1)) == pytest.approx(25.6)
    assert float(pipelined_s(2.0, 1.2, 8)) == pytest.approx(17.2)


@pytest.mark.parametrize(("attention", "exchange"), [(2.0, 1.2), (1.0, 1.7), (1.0, 1.0)])
def test_drawn_overlap_ends_when_the_formula_says(attention, exchange):
    rows = overlapped(8, attention, exchange)
    assert sum(rows[-1][1][-1]) == pytest.approx(float(pipelined_s(attention, exchange, 8)))
    lockstep = one_by_one([("attention", attention)] * 8 + [("exchange", exchange)] * 8)
    assert sum(lockstep[-1][1][-1]) == pytest.approx(8 * (attention + exchange))


def test_figure_4_gives_every_head_and_column_to_one_rank():
    drawing = PhasesDrawing("", "", HeadShape(8, 2), 64, Layout(kvp=2, tpa=2), Layout(kvp=2, tpa=2, tpf=2, ep=2))
    phases = [dict(drawing.phases(drawing.dense, rank)) for rank in range(4)]
    assert [phase["merge, Wo"].split("\n")[0] for phase in phases] == [
        "heads 0-1", "heads 4-5", "heads 2-3", "heads 6-7",
    ]  # fmt: skip
    assert [phase["FFN"].split("\n")[1] for phase in phases] == ["0-15", "16-31", "32-47", "48-63"]
    assert [phase["all-to-all"].split("\n")[1] for phase in phases] == ["0, 2", "1, 3", "0, 2", "1, 3"]
    experts = [dict(drawing.phases(drawing.sparse, rank))["experts"] for rank in range(4)]
    assert [text.split("\n")[0] for text in experts] == ["expert 0", "expert 0", "expert 1", "expert 1"]


@pytest.mark.parametrize(
    ("model", "dtype", "gigabytes"),
    [("deepseek-r1", "fp4", 17.57), ("llama-3.1-405b", "fp4", 129.0), ("llama-3.1-405b", "bfloat16", 516.1)],
)
def test_kv_of_a_million_tokens(model, dtype, gigabytes):
    bits = kv_elements(load_model(model)) * FORMATS[dtype].bits
    assert bits / 8 * 1e6 / 1e9 == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.parametrize(
    ("figure", "what"),
    [("5", "best tokens/s/user"), ("5", "tokens/s/GPU"), ("6", "best tokens/s/user"), ("6", "tokens/s/GPU")],
)
def test_headlines_of_helix_are_in_their_bands(helix, figure, what):
    (found,) = (made for made in helix.claims if made.figure == figure and made.what.startswith(what))
    assert abs(found.residual) <= TOLERANCE


def test_hop_b_is_worth_what_the_paper_says_for_405b_and_the_report_says_why_not_for_r1(helix):
    assert claim(helix, "7", "405B").holds
    missed = claim(helix, "7", "R1")
    assert not missed.holds
    assert "sensitivity" in missed.note
    (table,) = (table for table in helix.tables if table.name == "sensitivity")
    assert len(table.rows) >= 10
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_powers_of_two_are_a_part_of_all(helix):
    setting = Setting(load_model("llama-3.1-405b"), helix.system, Dtypes("fp4", "fp4", "fp4"))
    coarse, fine = (frontiers(setting, powers_of_two=powers) for powers in (True, False))
    assert coarse.configurations < fine.configurations
    assert fine.of("helix").user_tokens_per_s.max() >= coarse.of("helix").user_tokens_per_s.max()


# Medha


@pytest.mark.parametrize("tokens", [M, 2 * M, 4 * M, 10 * M])
def test_stages_divide_prefill_nearly(small, tokens):
    one_s, sixteen_s = (TiedDeployment(small, stages).prefill_s(tokens, 4096) for stages in (1, 16))
    assert 0.8 <= one_s / sixteen_s / 16 <= 1


def test_stages_do_not_speed_decode_up(small):
    decodes = [TiedDeployment(small, stages).decode_s(4 * M) for stages in (1, 2, 4, 8, 16)]
    assert decodes == sorted(decodes)


def test_kvp_and_stages_on_decode_are_met_by_one_host_share_and_one_latency(medha):
    met = [claim(medha, "16", "8 stages"), claim(medha, "17", "2 over 1"), claim(medha, "17", "1 over 4"),
           claim(medha, "17", "tokens/s"), claim(medha, "-", "32 over 4096")]  # fmt: skip
    assert all(made.holds for made in met)
    assert 0.5e-3 <= medha.system.fixed.step_s <= 0.7e-3
    assert 30e-6 <= medha.system.network.scale_out.latency_s <= 40e-6


def test_kvp_divides_attention_only(small):
    one, two, four = (TiedDeployment(small, 4, kvp).decode_s(10 * M) for kvp in (1, 2, 4))
    assert 1 / 2 < two / one < 1
    assert one / four == pytest.approx(2.5, rel=TOLERANCE)
    short = [TiedDeployment(small, 4, kvp).decode_s(1000) for kvp in (1, 4)]
    assert short[1] > short[0]  # nothing to divide, and an exchange more


def test_adaptive_chunks_dominate_static_ones(small):
    server = TiedDeployment(small)
    for chunk in (32, 128, 512):
        target_s = server.longest_s(M, chunk)
        seconds, longest_s = server.adaptive(M, target_s)
        assert longest_s <= target_s
        assert seconds < server.prefill_s(M, chunk)


def test_groups_join_and_keep_iterations_flat(small):
    grown = growth(small, 2 * M, 512, stages=4, most_kvp=4)
    assert (grown.kvp[0], grown.kvp[-1]) == (1, 4)
    joined = grown.steps_s[grown.kvp > 1]
    assert max(joined) / min(joined) < 1.1
    assert grown.alone_s[-1] > 3 * joined[-1]


def test_schedules_end_when_the_formula_says():
    chunks_s, stages = [1.0, 2.0, 3.0, 4.0], 4
    dense, standard = sequence_schedule(chunks_s, stages), standard_schedule(chunks_s, stages)
    assert sum(dense[-1][-1]) == pytest.approx((sum(chunks_s) + 3 * max(chunks_s)) / stages)
    assert sum(standard[-1][-1]) == pytest.approx(sum(chunks_s))
    for spans in dense:
        assert all(first[0] + first[1] <= second[0] + 1e-12 for first, second in pairwise(spans))


def test_resources_by_formula(medha):
    assert claim(medha, "-", "KV of 1M").modelled == 320
    assert claim(medha, "5b", "2^20").modelled == pytest.approx(20, abs=0.1)
    assert claim(medha, "5b", "2^21").modelled == pytest.approx(78.8, abs=0.1)
    assert claim(medha, "5a").modelled == pytest.approx(660_000, rel=0.01)


# Both


def test_few_constants_explain_many_numbers(helix, medha):
    fitted = {constant.name for found in (helix, medha) for constant in found.constants if constant.fitted}
    modelled = [made for found in (helix, medha) for made in found.claims if not made.formula]
    assert fitted == {"kernel_s", "collective_s", "attention_efficiency", "step_s", "scale_out.latency_s"}
    assert len(fitted) < len(modelled) / 4


def test_a_papers_constants_are_fitted_to_it_alone(helix, medha):
    fitted = [{constant.name for constant in found.constants if constant.fitted} for found in (helix, medha)]
    assert not fitted[0] & fitted[1]
    for found, other in ((helix, "2409.17264"), (medha, "2507.07120")):
        assert all(other not in constant.source for constant in found.constants if constant.fitted)


def test_a_papers_system_has_the_data_sheet_of_the_preset_and_reserves_nothing(helix, medha):
    for found in (helix, medha):
        ours, preset = found.system, load_system(found.system.name)
        assert (ours.memory.bytes_per_s, ours.arithmetic.flops_per_s) == (
            preset.memory.bytes_per_s,
            preset.arithmetic.flops_per_s,
        )
        assert ours.network.in_switch_reduction == preset.network.in_switch_reduction
        for link, known in (
            (ours.network.scale_up, preset.network.scale_up),
            (ours.network.scale_out, preset.network.scale_out),
        ):
            assert (link.bytes_per_s, link.ranks) == (known.bytes_per_s, known.ranks)
        assert ours.usable_bytes == ours.memory.size_bytes
        assert preset.usable_bytes < preset.memory.size_bytes


def test_what_medhas_system_takes_from_the_preset_is_that_of_the_preset(medha):
    preset = load_system("h100")
    taken = [constant for constant in medha.constants if constant.source.startswith("taken from the preset")]
    assert {constant.name for constant in taken} == {"kernel_s", "collective_s", "scale_up.latency_s"}
    assert all(constant.value == preset.constants[constant.name] for constant in taken)


def test_what_is_outside_says_why(helix, medha):
    for found in (helix, medha):
        outside = [made for made in found.claims if not made.holds]
        assert all(made.note for made in outside)
        assert len(outside) <= len(found.claims) / 4


def test_reports_hold_every_claim_and_constant(helix, medha):
    for found in (helix, medha):
        text, data = report.as_markdown(found), json.loads(json.dumps(report.as_dict(found)))
        assert len(data["claims"]) == len(found.claims)
        for constant in found.constants:
            assert constant.source in text
        for made in found.claims:
            assert made.what in text
        assert all(drawing.name in text for drawing in found.drawings)


@needs_matplotlib
@pytest.mark.parametrize("paper", few(["helix", "medha"]))
def test_the_verb_writes_a_report_and_pictures_that_open(paper, request, tmp_path, monkeypatch, capfd):
    from matplotlib import image

    found = request.getfixturevalue(paper)
    monkeypatch.setattr(f"longhelix.cli.figures._{paper}", lambda: found)
    assert main(["figures", paper, "--out", str(tmp_path / "made"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["paper"] == paper
    assert (tmp_path / "made" / f"{paper}.md").read_text().startswith("# ")
    for drawing in found.drawings:
        pixels = image.imread(tmp_path / "made" / f"{drawing.name}.png")
        assert pixels[..., :3].std() > 0
        assert "<svg" in (tmp_path / "made" / f"{drawing.name}.svg").read_text()


def test_an_unknown_paper_is_refused_in_a_sentence(tmp_path, capfd):
    assert main(["figures", "ring", "--out", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert "helix" in error
    assert "medha" in error
    assert "Traceback" not in error


def test_without_matplotlib_the_extra_is_named(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["figures", "helix", "--out", str(tmp_path), "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "missing_extra"


@needs_matplotlib
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert main(["figures", "helix", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "--out" in capfd.readouterr().err
