"""What a plan recommends: every target holds at the same time, and nothing better does."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longhelix import UserError
from longhelix.perf.memory import memory
from longhelix.perf.prefill import prefill
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.perf.step import cycle_seconds, decode_seconds
from longhelix.plan.answer import answer
from longhelix.plan.candidate import as_layouts
from longhelix.plan.choice import Chooser
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.question import Question
from longhelix.plan.service import ServiceLoad, service
from longhelix.plan.space import OVERLAPPED, STRATEGIES, space
from longhelix.plan.sweep import full_sweep, units
from longhelix.spec.presets import load_model, load_system
from tiers import few

pytestmark = pytest.mark.unit

R1, SMALL = (
    Setting(load_model(model), load_system(system), Dtypes(dtype, dtype, dtype))
    for model, system, dtype in (("deepseek-r1", "gb200", "fp4"), ("llama-3-8b", "h100", "bfloat16"))
)
NODES = 4


def every_batch(setting, searched, context, most):
    """Each layout with each batch up to `most` that memory holds: the indices of layouts, and batches."""
    index, batch = (
        grid.ravel() for grid in np.meshgrid(np.arange(len(searched)), np.arange(1.0, most + 1), indexing="ij")
    )
    layouts = searched.layouts.take(index)
    held = memory(setting, layouts, batch, context).total_bytes <= setting.capacity_bytes(layouts)
    return index[held], batch[held]


@pytest.mark.parametrize("setting", [R1, SMALL], ids=["r1", "8b"])
@pytest.mark.parametrize("any_shape", [False, True])
def test_no_batch_is_better_than_those_that_a_sweep_has(setting, any_shape):
    """For every TTL the most users, and the max tokens/s/GPU, of each strategy."""
    context, budgets_s = 200_000.0, (0.004, 0.007, 0.02, 0.1)
    searched = space(setting.model, 6, None if any_shape else 4)
    points = full_sweep(ServiceLoad(setting, int(context)), searched, budgets_s).points
    index, batch = every_batch(setting, searched, context, 450)
    layouts = searched.layouts.take(index)
    ttl_s = decode_seconds(setting, layouts, batch, context)
    rate = batch / ttl_s / layouts.world_size
    assert points.batch.max() <= 450
    for budget_s, strategy in itertools.product((*budgets_s, np.inf), range(len(STRATEGIES))):
        every = (searched.strategy[index] == strategy) & (ttl_s <= budget_s)
        found = (searched.strategy[points.layout] == strategy) & (points.ttl_s <= budget_s)
        assert points.batch[found].max(initial=0) == batch[every].max(initial=0)
        assert points.gpu_tokens_per_s[found].max(initial=0) == rate[every].max(initial=0)


def test_others_than_multiples_of_a_unit_take_as_long_as_the_next():
    searched = space(R1.model, 8)
    each = units(searched.layouts)
    assert each.max() == 8
    whole, more = (decode_seconds(R1, searched.layouts, batch, 1e5) for batch in (3 * each, 2 * each + 1))
    grouped = searched.layouts.dp > 1
    assert grouped.any()
    np.testing.assert_array_equal(whole[~grouped], more[~grouped])
    assert (more[grouped] <= whole[grouped]).all()
    assert (more[grouped] > 0.9 * whole[grouped]).all()


def test_shapes_are_those_of_clusters_and_engines():
    searched = space(R1.model, 80, 8).layouts
    counts = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80}
    assert set(searched.world_size) <= counts
    assert set(searched.num_ranks) <= counts
    assert (2048 % searched.tpf == 0).all()
    assert (256 % searched.ep == 0).all()
    assert {8, 16, 32, 64} <= set(searched.kvp)
    every = space(R1.model, 80).layouts
    assert len(every) > 5 * len(searched)
    assert 59 in every.tpf


def configurations(question, most_batch):
    """Each layout, batch and chunk size within memory, taken one by one: what it gives, by the definitions."""
    use = ServiceLoad(question.setting, question.context, question.demand, question.ttft_s)
    searched = space(question.setting.model, question.max_gpus, question.node_gpus)
    for layout, chunk in itertools.product(range(len(searched)), question.chunks):
        layouts = searched.layouts.take(np.full(most_batch, layout))
        batch = np.arange(1.0, most_batch + 1)
        fits = use.memory_bytes(layouts, batch, float(chunk)) <= question.setting.capacity_bytes(layouts)
        given = service(use, layouts, batch, np.full(most_batch, float(chunk)))
        for position in np.flatnonzero(fits):
            yield float(layouts.world_size[0]), given.take(np.array([position]))


TARGETS = [
    {"ttl_s": 0.02, "ttl_with_prefill_s": 0.03},
    {"ttl_s": 0.012, "ttft_s": 3.0},
    {"ttl_with_prefill_s": 0.012, "ttft_s": 3.0},
    {"ttft_s": 2.0},
    {"ttl_s": 0.02, "ttft_s": 8.0, "users": 30},
    {"ttl_s": 0.02, "users": 30, "fewest_gpus": True},
    {"ttl_s": 0.0001},
]


@pytest.mark.parametrize("targets", few(TARGETS, 3), ids=str)
def test_nothing_is_better_than_the_best(targets):
    question = Question(SMALL, 32_768, 4, **targets)
    no_targets = {"ttl_s": np.inf, "ttl_with_prefill_s": np.inf, "ttft_s": np.inf, "users": 1, "fewest_gpus": False}
    best, most = None, no_targets | targets
    for gpus, served in configurations(question, 80):
        replicas = np.ceil(most["users"] / served.users[0])
        late = served.ttl_s[0] > most["ttl_s"] or served.ttl_p95_s[0] > most["ttl_with_prefill_s"]
        if late or served.ttft_s[0] > most["ttft_s"] or gpus * replicas > 4:
            continue
        value = gpus * replicas if most["fewest_gpus"] else -served.tokens_per_s[0] / gpus
        best = value if best is None else min(best, value)
    found = answer(question)
    assert (found.best is None) == (best is None)
    if best is None:
        assert found.nearest
        assert all(choice.violates for choice in found.nearest)
    else:
        assert (found.best.gpus if most["fewest_gpus"] else -found.best.tokens_per_s_per_gpu) == pytest.approx(best)
        assert found.best.violates == ()
        assert found.best.users >= most["users"]


@pytest.mark.parametrize("hit", few([0.6, 0.0]))
@pytest.mark.parametrize("rate", [None, 3.0])
def test_nothing_is_much_better_for_a_demand(rate, hit):
    """Not every batch is tried: a demand's rate depends on it smoothly."""
    demand = Demand((Kind(0.9, 2000, 200), Kind(0.1, 20_000, 100)), rate, hit)
    question = Question(SMALL, demand.longest, 4, ttl_s=0.03, ttft_s=2.0, demand=demand)
    best = np.inf
    for gpus, served in configurations(question, 120):
        replicas = served.replicas[0]
        if served.ttl_p95_s[0] <= 0.03 and served.ttft_s[0] <= 2.0 and gpus * replicas <= 4:
            best = min(best, gpus * replicas if rate else -served.tokens_per_s[0] / gpus)
    found = answer(question).best
    if rate:
        assert found.gpus == best
        assert found.rate_per_s == pytest.approx(rate)
    else:
        assert -found.tokens_per_s_per_gpu <= 0.99 * best


def test_what_is_told_of_a_choice_is_so():
    """Against the steps themselves."""
    question = Question(R1, 1_000_000, 64, ttl_with_prefill_s=0.02, ttft_s=60.0, gpu_hour=2.5)
    best = answer(question).best
    layouts = as_layouts(best.layout, hop_b=best.strategy in OVERLAPPED)
    decodes = layouts.decode(np.ceil(best.batch / layouts.pp), 1e6)
    chunk = layouts.chunk(float(best.chunk_tokens), 1e6 - best.chunk_tokens)
    assert best.ttl_s == decode_seconds(R1, layouts, float(best.batch), 1e6)[0]
    assert best.ttl_p95_s == cycle_seconds(R1, layouts, decodes + chunk)[0] <= 0.02
    exact = prefill(R1, layouts, 1e6, float(best.chunk_tokens), beside=decodes, nodes=512).seconds[0]
    assert best.ttft_s == pytest.approx(exact, rel=0.005)
    assert best.ttft_s <= 60
    assert best.gpus * best.tokens_per_s_per_gpu == pytest.approx(best.users / best.ttl_s)
    assert best.cost_per_million_tokens == pytest.approx(2.5 / 3600 / best.tokens_per_s_per_gpu * 1e6)
    held = memory(R1, layouts, float(best.batch), 1e6, float(best.chunk_tokens)).total_bytes[0]
    assert best.headroom_bytes == pytest.approx(R1.capacity_bytes(layouts)[0] - held, abs=1)


def test_accepted_drafts_shorten_the_time_of_a_token():
    """Everything that a choice tells is per token, of steps with two rows of each request."""
    drafted = replace(R1, drafts=Drafts(1, 1.8))
    best = answer(Question(drafted, 1_000_000, 16, ttl_s=0.012, ttl_with_prefill_s=0.02)).best
    assert (best.draft_tokens, best.accepted_tokens) == (1, 1.8)
    layouts = as_layouts(best.layout, hop_b=best.strategy in OVERLAPPED)
    assert best.ttl_s == decode_seconds(drafted, layouts, float(best.batch), 1e6)[0] / 1.8
    assert best.ttl_p95_s <= 0.02
    assert best.gpus * best.tokens_per_s_per_gpu == pytest.approx(best.users / best.ttl_s)
    plain = answer(Question(R1, 1_000_000, 16, ttl_s=0.012, ttl_with_prefill_s=0.02)).best
    assert 1 < best.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu < 1.8


@pytest.mark.parametrize("accepted", [1.0, 1.5])
def test_requests_with_drafts_end_as_their_tokens_come(accepted):
    layouts = space(SMALL.model, 2, 8).layouts.take(np.zeros(3, dtype=np.intp))
    drafted = replace(SMALL, drafts=Drafts(1, accepted))
    given = service(
        ServiceLoad(drafted, 4400, Demand((Kind(1.0, 4000, 400),))),
        layouts,
        np.array([1.0, 8.0, 32.0]),
        np.full(3, 512.0),
    )
    np.testing.assert_allclose(given.rate_per_s * 400, given.tokens_per_s)
    assert (given.users <= np.array([1.0, 8.0, 32.0]) * (1 + 1e-9)).all()
    assert (given.ttl_s < given.ttl_p95_s).all()


def demanded(layout_count=1, **changes):
    layouts = space(SMALL.model, 2, 8).layouts.take(np.zeros(layout_count, dtype=np.intp))
    demand = Demand((Kind(1.0, 4000, 400),), **changes)
    return ServiceLoad(SMALL, 4400, demand), layouts


def test_tokens_come_as_fast_as_the_rate_says():
    use, layouts = demanded(3)
    given = service(use, layouts, np.array([1.0, 8.0, 32.0]), np.full(3, 512.0))
    np.testing.assert_allclose(given.rate_per_s * 400, given.tokens_per_s)
    assert (given.users <= np.array([1.0, 8.0, 32.0]) * (1 + 1e-9)).all()
    assert (given.ttl_s < given.ttl_p95_s).all()
    assert (np.diff(given.rate_per_s) > 0).all()


def test_a_prefix_that_is_there_is_not_prefilled():
    (cold, layouts), (warm, _) = demanded(), demanded(prefix_hit=0.75)
    one, chunk = np.array([1.0]), np.array([500.0])
    first, again = service(cold, layouts, one, chunk), service(warm, layouts, one, chunk)
    rest = prefill(SMALL, layouts, 1000.0, chunk, prefix=3000.0, beside=warm.decodes(layouts, one), nodes=NODES)
    assert again.ttft_s[0] - rest.seconds[0] >= 0
    assert again.ttft_s[0] < 0.5 * first.ttft_s[0]


def test_waits_grow_with_the_rate():
    one, chunk = np.array([16.0]), np.array([512.0])
    ttfts = []
    for rate in (0.5, 2.0, 4.0):
        use, layouts = demanded(rate_per_s=rate)
        given = service(use, layouts, one, chunk)
        assert given.rate_per_s[0] * given.replicas[0] == pytest.approx(rate)
        ttfts.append(given.ttft_s[0] if given.replicas[0] == 1 else np.inf)
    assert ttfts == sorted(ttfts)


lengths = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**4)), min_size=1, max_size=50)


@given(lengths)
@settings(deadline=None)
def test_kinds_have_the_means_of_all(drawn):
    demand = Demand.of(drawn, None, 0.0)
    assert sum(kind.share for kind in demand.kinds) == pytest.approx(1)
    assert demand.output_tokens == pytest.approx(sum(answer for _, answer in drawn) / len(drawn), abs=0.5)
    mean = sum(kind.share * kind.input_tokens for kind in demand.kinds)
    assert mean == pytest.approx(sum(prompt for prompt, _ in drawn) / len(drawn), abs=0.5)
    assert len(demand.kinds) <= 11


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinds": (Kind(1.0, 0, 5),)}, "isl is 0"),
        ({"kinds": (Kind(1.0, 5, 0),)}, "osl is 0"),
        ({"rate_per_s": 0.0}, "rate is 0.0"),
        ({"rate_per_s": float("nan")}, "rate is nan"),
        ({"prefix_hit": 1.0}, "prefix-hit is 1.0"),
        ({"prefix_hit": -0.1}, "prefix-hit is -0.1"),
    ],
)
def test_bad_demands(changes, words):
    with pytest.raises(UserError, match=words):
        Demand(**{"kinds": (Kind(1.0, 5, 5),)} | changes)


def test_a_rate_that_no_number_of_gpus_holds_says_what_it_takes():
    demand = Demand((Kind(1.0, 4000, 400),), rate_per_s=1000.0)
    found = answer(Question(SMALL, 4400, 8, ttl_s=0.05, demand=demand))
    assert found.best is None
    assert any("GPUs" in words for choice in found.nearest for words in choice.violates)
    assert Chooser(found.question, found.sweep.space).best() is None


def ending(input_tokens, output_tokens, rate=None):
    return Demand.of([(input_tokens, output_tokens)], rate, 0.0)


def test_a_rate_decides_how_many_replicas_there_are():
    demand = ending(100_000, 100, 0.1)
    best = answer(Question(SMALL, demand.longest, 8, ttft_s=10.0, demand=demand)).best
    assert best.replicas == 1
    assert best.rate_per_s == pytest.approx(0.1)
    assert best.users == 1
    with pytest.raises(UserError, match="leave out --users or --rate"):
        Question(SMALL, demand.longest, 8, users=2, demand=demand)


def test_users_alone_are_a_target():
    best = answer(Question(SMALL, 8000, 8, users=100)).best
    assert best.users >= 100
    assert best.gpus <= 8
    assert best.violates == ()
    found = answer(Question(SMALL, 128_000, 8, users=100_000))
    assert found.best is None
    assert found.nearest


def test_without_targets_the_best_fits_beside_a_chunk():
    setting = Setting(load_model("llama-3.1-405b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    assert answer(Question(setting, 4000, 16)).best.headroom_bytes >= 0


@pytest.mark.parametrize("rate", [None, 1.0])
def test_a_ttft_that_nothing_keeps_has_nearest_ones(rate):
    demand = ending(100_000, 100, rate)
    found = answer(Question(SMALL, demand.longest, 8, ttft_s=0.001, demand=demand, gpu_hour=2.0))
    assert found.best is None
    assert found.nearest
    for choice in found.nearest:
        assert choice.users >= 1
        assert choice.cost_per_million_tokens > 0
        assert choice.rate_per_s > 0 if rate is None else choice.rate_per_s == pytest.approx(rate)
        assert any(missed.startswith("TTFT ") for missed in choice.violates)


def test_the_longest_request_is_served_in_time_though_there_are_none_of_it_on_average():
    demand = Demand.of([(135_000, 100)] * 3 + [(500_000, 100)], None, 0.0)
    assert demand.longest == 500_100
    assert demand.output_tokens == 100
    assert sum(kind.share for kind in demand.kinds) == 1
    question = Question(SMALL, demand.longest, 8, ttft_s=60.0, demand=demand)
    best = answer(question).best
    layouts = as_layouts(best.layout, hop_b=best.strategy in OVERLAPPED)
    alone = prefill(SMALL, layouts, 500_000.0, float(best.chunk_tokens)).seconds[0]
    assert alone < best.ttft_s <= 60
