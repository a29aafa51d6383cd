"""The planner: its space, its sweep, frontiers, targets, reasons."""

import csv
import io
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix import Layout, UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import memory
from longhelix.perf.prefill import prefill, prefill_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_seconds
from longhelix.plan import report, summary
from longhelix.plan.answer import answer
from longhelix.plan.candidate import as_layouts, degrees
from longhelix.plan.crossover import crossovers
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.estimate import estimate
from longhelix.plan.pareto import at_least, frontier, gain
from longhelix.plan.question import Question
from longhelix.plan.reasons import neighbours, rejections
from longhelix.plan.service import CHUNKS, ServiceLoad, mixed_seconds, service
from longhelix.plan.space import HELIX, STRATEGIES, space
from longhelix.plan.sweep import batches, sweep
from longhelix.spec.presets import load_model, load_system, model_names, system_names
from longhelix.units import digits
from toy_model import attention_of

pytestmark = pytest.mark.unit

# As if parts of an exchange divided its latency, so that HOP-B has something to hide.
GB200 = load_system("gb200").replaced({"part_fixed_share": 0.0}, "assumed: as in arXiv 2507.07120")
FP4 = Dtypes("fp4", "fp4", "fp4")
R1, LLAMA = (Setting(load_model(name), GB200, FP4) for name in ("deepseek-r1", "llama-3.1-405b"))


@pytest.fixture(scope="module")
def r1():
    return answer(Question(R1, 1_000_000, 64))


@pytest.fixture(scope="module")
def llama():
    return answer(Question(LLAMA, 1_000_000, 64, ttl_s=0.01, ttl_with_prefill_s=0.01))


def test_every_layout_of_the_space_is_one_and_there_is_none_twice():
    model = R1.model
    searched = space(model, 24)
    seen = set()
    for index in range(len(searched)):
        layouts = searched.layouts.take(np.array([index]))
        dp, kvp, *others = (
            int(getattr(layouts, name)[0]) for name in ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")
        )
        layout = Layout(dp * kvp, *others)
        model.check(layout)
        assert layout.world_size == layouts.world_size[0] <= 24
        name = STRATEGIES[searched.strategy[index]].name
        assert not layout.duplicates_kv(attention_of(model).heads) or name == "tp"
        assert (dp > 1, kvp > 1) == (name.startswith(("dp", "helix_dp")), name.startswith(("helix", "tied")))
        seen.add((name, dp, kvp, *others))
        words = degrees(layouts, 0)
        again = as_layouts(words, hop_b=bool(layouts.hop_b[0]))
        assert all(getattr(again, field.name)[0] == getattr(layouts, field.name)[0] for field in fields(Layouts))
        assert (words["placement"], words["dp"]) == (("local", 1) if name.startswith("dp") else ("striped", dp))
    assert len(seen) == len(searched)


def test_the_space_of_helix_is_all_factorisations():
    searched = space(LLAMA.model, 64)
    helix = [index for index, strategy in enumerate(STRATEGIES) if strategy.name == "helix"]
    layouts = searched.layouts.take(np.isin(searched.strategy, helix))
    expected = {
        (kvp, tpa, pp) for tpa in range(1, 9) for kvp in range(2, 65) for pp in range(1, 127) if kvp * tpa * pp <= 64
    }
    found = set(zip(layouts.kvp.astype(int), layouts.tpa.astype(int), layouts.pp.astype(int), strict=True))
    assert found == expected
    assert len(layouts) == len(expected)


def test_the_space_of_groups_is_all_factorisations():
    searched = space(LLAMA.model, 24)
    layouts = searched.layouts.take(
        searched.strategy == next(i for i, s in enumerate(STRATEGIES) if s.title == "DP x KVP")
    )
    expected = {
        (dp, kvp, tpa, pp) for tpa in range(1, 9) for kvp in range(2, 13) for dp in range(2, 13) for pp in range(1, 7)
        if dp * kvp * tpa * pp <= 24
    }  # fmt: skip
    found = zip(*(getattr(layouts, name).astype(int) for name in ("dp", "kvp", "tpa", "pp")), strict=True)
    assert set(found) == expected
    assert len(layouts) == len(expected)
    assert (layouts.tpf == layouts.num_ranks).all()


def test_a_sweep_costs_what_each_configuration_costs_alone(r1):
    points, searched = r1.sweep.points, r1.sweep.space
    for position in np.random.default_rng(0).choice(len(points), 40, replace=False):
        layouts = searched.layouts.take(points.layout[[position]])
        batch = float(points.batch[position])
        assert decode_seconds(R1, layouts, batch, 1e6)[0] == points.ttl_s[position]
        assert memory(R1, layouts, batch, 1e6).total_bytes[0] == points.memory_bytes[position]
        assert points.memory_bytes[position] <= GB200.usable_bytes


def test_estimate_equals_the_sweep(llama):
    for candidate in llama.strategies["helix"][::7] + llama.strategies["tied"][::7]:
        layout = Layout(*(candidate.layout[name] for name in ("kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")))
        hop_b = candidate.strategy == "helix"
        one = estimate(LLAMA, layout, context=10**6, batch=candidate.batch, chunk=1, hop_b=hop_b)
        assert one.tokens_per_s_per_user == pytest.approx(candidate.tokens_per_s_per_user, rel=1e-12)
        assert one.tokens_per_s_per_gpu == pytest.approx(candidate.tokens_per_s_per_gpu, rel=1e-12)
        assert one.ttl_s == pytest.approx(sum(item.seconds for item in one.items), rel=1e-12)
        assert all(item.source for item in one.items)


def test_batches_are_every_small_one_and_go_on_in_small_steps():
    sizes = batches(1000)
    assert list(sizes[:32]) == list(range(1, 33))
    assert sizes[-1] <= 1000
    assert (sizes[1:] / sizes[:-1])[32:].max() <= 17 / 16


points = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=40)


@given(points)
def test_a_frontier_has_no_dominated_point_and_dominates_all_others(drawn):
    user, gpu = (np.array(values) for values in zip(*drawn, strict=True))
    kept = frontier(user, gpu)
    assert (np.diff(user[kept]) > 0).all()
    assert (np.diff(gpu[kept]) < 0).all()
    for x, y in drawn:
        assert ((user[kept] >= x) & (gpu[kept] >= y)).any()


@given(points, points)
def test_gains_are_those_of_all_pairs(ours, base):
    user, gpu = (np.array(values) for values in zip(*ours, strict=True))
    base_user, base_gpu = (np.array(values) for values in zip(*base, strict=True))
    found = gain(user, gpu, base_user, base_gpu)
    assert found.interactivity == user.max() / base_user.max()
    wanted = [x for x, _ in ours + base if x <= min(user.max(), base_user.max())]
    ratios = [max(y for x, y in ours if x >= w) / max(y for x, y in base if x >= w) for w in wanted]
    assert found.throughput == pytest.approx(max(ratios))
    assert at_least(user, gpu, np.array([1e3]))[0] == 0


def test_the_frontier_is_that_of_all_strategies(r1):
    best = max(found[-1].tokens_per_s_per_user for found in r1.strategies.values() if found)
    assert r1.frontier[-1].tokens_per_s_per_user == best
    assert {candidate.strategy for candidate in r1.baseline}.isdisjoint(HELIX)
    assert r1.headline.interactivity == pytest.approx(best / r1.baseline[-1].tokens_per_s_per_user)


def test_users_served_within_a_ttl_are_the_largest_batches(r1):
    swept, strategy = r1.sweep.points, r1.sweep.space.strategy[r1.sweep.points.layout]
    for served in r1.users_at_ttl:
        index = next(i for i, each in enumerate(STRATEGIES) if each.name == served.strategy)
        within = swept.batch[(strategy == index) & (swept.ttl_s <= served.ttl_s)]
        assert (served.most.batch if served.most else 0) == within.max(initial=0)


def test_both_targets_give_a_frontier_of_latencies_and_the_fewest_gpus():
    question = Question(LLAMA, 1_000_000, 64, ttl_s=0.05, ttft_s=60.0)
    found = answer(question)
    kept, latencies = found.latencies.frontier(), found.latencies
    ttft_s, tbt_s = latencies.ttft_s.ravel()[kept], latencies.tbt_s.ravel()[kept]
    assert (np.diff(tbt_s) > 0).all()
    assert (np.diff(ttft_s) < 0).all()
    flat = latencies.fewest_gpus(60.0, 0.05)
    index, column = divmod(flat, len(CHUNKS))
    layouts = found.sweep.space.layouts.take(np.array([index]))
    assert prefill_seconds(LLAMA, layouts, 1e6, float(CHUNKS[column]))[0] == latencies.ttft_s[index, column] <= 60
    meets = ((latencies.ttft_s <= 60) & (latencies.tbt_s <= 0.05)).any(axis=1)
    assert latencies.gpus[index] == latencies.gpus[meets].min()
    assert latencies.fewest_gpus(1e-3, 0.05) is None


def test_neighbours_say_what_they_cost(llama):
    found = {neighbour.change: neighbour for neighbour in neighbours(llama.question, llama.best)}
    assert found["TP only"].reason.startswith("attention ")
    assert "exchange" in found["no HOP-B"].reason
    assert "dense FFN" in found["FFN tied to TPA (Medha)"].reason
    assert all(neighbour.ttl_s is None or neighbour.ttl_s > llama.best.ttl_s for neighbour in found.values())


MIXED = Demand((Kind(0.8, 4000, 500), Kind(0.2, 200_000, 100)), prefix_hit=0.25)


def test_a_demand_is_priced_at_its_mean_lengths():
    """Frontiers, latencies and neighbours as the best is, and not as if all requests were as long as the longest."""
    question = Question(LLAMA, MIXED.longest, 16, ttl_s=0.05, ttft_s=60.0, demand=MIXED)
    use, found = ServiceLoad(LLAMA, MIXED.longest, MIXED, 60.0), answer(question)
    points, searched = found.sweep.points, found.sweep.space
    for position in range(0, len(points), 501):
        layouts = searched.layouts.take(points.layout[[position]])
        batch = points.batch[[position]]
        assert points.ttl_s[position] == decode_seconds(LLAMA, layouts, batch, MIXED.kv_tokens)[0]
        assert points.memory_bytes[position] == use.memory_bytes(layouts, batch, 0.0)[0]
    index, column = divmod(int(found.latencies.frontier()[0]), len(CHUNKS))
    layouts, chunk = searched.layouts.take(np.array([index])), float(CHUNKS[column])
    alone = prefill(LLAMA, layouts, 150_000.0, chunk, prefix=50_000.0).seconds[0]
    assert found.latencies.ttft_s[index, column] == alone
    assert found.latencies.tbt_s[index, column] == mixed_seconds(use, layouts, 0.0, chunk)[0]
    layout = found.best.layout | {"kvp": 4, "tpa": 4, "tpf": 16, "ep": 1, "pp": 1, "placement": "striped"}
    best = replace(found.best, strategy="helix", layout=layout, batch=4, chunk_tokens=512)
    told = [each for each in neighbours(question, best) if each.ttl_s is not None and "DP" not in each.layout]
    assert told
    for each in told:
        degrees = {
            name.lower(): int(degree) for name, degree in re.findall(r"(KVP|TPA|TPF|EP|PP) ([0-9]+)", each.layout)
        }
        copies = {"ffn_replicas": degrees["kvp"]} if "copies" in each.layout else {}
        hop_b = best.strategy == "helix" and each.change in (
            "PP doubled, KVP halved",
            "TPA doubled, KVP halved",
        )
        layouts = Layouts.of([Layout(**degrees, **copies)], hop_b=hop_b or each.change.startswith("KV sharded"))
        given = service(use, layouts, np.array([float(best.batch)]), np.array([float(best.chunk_tokens)]))
        assert each.ttl_s == given.ttl_s[0], each.change


def test_the_headline_is_the_gain_at_the_asked_ttl(llama, r1):
    question = replace(llama.question, ttl_s=0.02)
    found = answer(question)
    points = found.sweep.points
    helix = np.array([STRATEGIES[index].name in HELIX for index in found.sweep.space.strategy[points.layout]])
    within = points.ttl_s <= 0.02
    ours, others = (points.gpu_tokens_per_s[within & kept].max() for kept in (helix, ~helix))
    assert (found.at_ttl.gpu_tokens_per_s, found.at_ttl.base_gpu_tokens_per_s) == (ours, others)
    compared = dict(summary.lines(found))["Compared"]
    assert compared.startswith(
        f"at 20 ms, Helix has {digits(ours / others)}x the tokens/s/GPU of the best other strategy ({digits(ours)} and "
        f"{digits(others)}); largest gain of Helix {digits(found.headline.throughput)}x tokens/s/GPU"
    )
    at_ttl = report.as_json(found, 1.0, [], [], [])["at_ttl"]
    assert at_ttl["throughput_gain"] == found.at_ttl.ratio == ours / others
    assert r1.at_ttl is None
    assert dict(summary.lines(r1))["Compared"].startswith("largest gain of Helix")


def test_a_ttl_that_one_side_alone_reaches_is_said_to_be(llama):
    fastest = {name: found[-1].ttl_s for name, found in llama.strategies.items() if found}
    between = (min(fastest[name] for name in HELIX) + min(fastest[name] for name in fastest if name not in HELIX)) / 2
    found = answer(replace(llama.question, ttl_s=between))
    assert found.at_ttl.ratio is None
    assert "only Helix runs" in dict(summary.lines(found))["Compared"]
    assert "neither Helix nor another" in dict(summary.lines(answer(replace(llama.question, ttl_s=1e-5))))["Compared"]


def test_a_neighbour_without_room_says_what_it_lacks():
    question = Question(LLAMA, 1_000_000, 64, ttl_s=0.05)
    found = {neighbour.change: neighbour for neighbour in neighbours(question, answer(question).best)}
    assert found["TP only"].ttl_s is None
    assert "short by" in found["TP only"].reason


def test_rejections_have_bytes(llama):
    found = {rejection.strategy: rejection for rejection in rejections(llama.question, llama.sweep)}
    assert found["tp"].rejected < found["tp"].layouts
    assert "needs 331.9 GB per GPU, has 178.8: short by 153.1 GB (weights 202.9, KV 129.0" in found["tp"].reason


def test_kvp_starts_to_pay_with_context(r1):
    crossed = {(each.context, each.batch): each for each in crossovers(r1.question, r1.sweep.space, 64)}
    assert not crossed[4096, 1].pays
    assert crossed[1048576, 1].pays
    assert crossed[1048576, 1].kvp > 1


@pytest.mark.parametrize(("max_gpus", "compared"), [(1, 1), (3, 2), (5, 4), (12, 8), (20, 16), (24, 24), (63, 56)])
def test_crossovers_are_of_the_largest_layouts_that_there_are(max_gpus, compared):
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    question = Question(setting, 4096, max_gpus)
    crossed = crossovers(question, space(setting.model, max_gpus, question.node_gpus), max_gpus)
    assert {each.gpus for each in crossed} == {compared}
    assert any(each.others_s is not None for each in crossed)


@pytest.mark.slow
def test_every_number_of_gpus_has_crossovers():
    """Each number of GPUs up to 130, and every preset and system somewhere among them."""
    models = model_names()
    for index, system in enumerate(map(load_system, system_names())):
        for max_gpus in range(1 + index % 3, min(131, 1 + system.network.scale_out.ranks), 3):
            setting = Setting(load_model(models[max_gpus % len(models)]), system, Dtypes("bfloat16", "bfloat16"))
            question = Question(setting, 4096, max_gpus)
            searched = space(setting.model, max_gpus, question.node_gpus)
            assert max_gpus / 2 < crossovers(question, searched, max_gpus)[0].gpus <= max_gpus


def test_reports_hold_every_candidate(r1):
    rows = list(csv.DictReader(io.StringIO(report.as_csv(r1))))
    assert len(rows) == sum(map(len, r1.strategies.values()))
    assert float(rows[-1]["tokens_per_s_per_user"]) == r1.strategies["helix_dp"][-1].tokens_per_s_per_user
    as_json = report.as_json(r1, 1.0, [], [], [])
    assert set(as_json) >= {"configurations", "seconds", "frontier", "baseline", "users_at_ttl", "headline"}
    assert as_json["headline"]["interactivity_gain"] == r1.headline.interactivity
    assert set(as_json["frontier"][0]) == {
        "strategy", "layout", "gpus", "batch", "tokens_per_s_per_user", "tokens_per_s_per_gpu", "memory_bytes_per_gpu",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"context": 0}, "context is 0"),
        ({"max_gpus": 0}, "max-gpus is 0"),
        ({"max_gpus": 5000}, "max-gpus is 5000: set it to 1024 or less"),
        ({"users": 0}, "users is 0"),
        ({"ttl_s": 0.0}, "ttl is 0.0 s"),
    ],
)
def test_bad_questions(wrong, words):
    with pytest.raises(UserError, match=words):
        Question(**{"setting": R1, "context": 1000, "max_gpus": 8} | wrong)


def test_what_fits_nowhere_is_said_with_its_bytes():
    with pytest.raises(UserError, match=r"one request of 1M tokens does not fit on 1 GPU: .* lacks .* GB"):
        answer(Question(LLAMA, 1_000_000, 1))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({}, "the balance of tokens/s/user and tokens/s/GPU"),
        ({"ttl_s": 0.02}, "TPOT: "),
        ({"ttl_s": 0.02, "demand": Demand((Kind(1.0, 8000, 500),))}, "TPOT: "),
        ({"ttft_s": 60.0}, "memory: "),
        ({"ttft_s": 0.3, "demand": Demand((Kind(1.0, 8000, 500),))}, "TTFT: "),
        ({"ttl_with_prefill_s": 0.015}, "steps with a chunk: "),
        ({"ttft_s": 1.0, "demand": Demand((Kind(1.0, 8000, 500),), rate_per_s=4.0)}, "the question: "),
    ],
)
def test_a_plan_names_what_limits_its_users(targets, words):
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    found = answer(Question(setting, 8500, 4, **targets))
    assert dict(summary.lines(found))["Limited by"].startswith(words)


def test_a_sweep_counts_what_it_looked_at():
    searched = space(R1.model, 8)
    assert sweep(R1, searched, 1e6, np.array([1.0, 2.0])).configurations == 2 * len(searched)


def test_local_attention_balances_by_requests():
    """9 requests over 8 ranks: one rank has two."""
    layouts = Layouts.of([Layout(kvp=8, tpf=8)], local=True)
    held = [memory(R1, layouts, batch, 1e6).kv_bytes[0] for batch in (8.0, 9.0)]
    assert held[1] == 2 * held[0]
