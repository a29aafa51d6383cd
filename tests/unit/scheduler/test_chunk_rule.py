"""How many prompt tokens a step computes."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.chunk_rule import AdaptiveChunks
from longhelix.scheduler.corrected_cost import CorrectedCost
from longhelix.scheduler.load import Load
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit


def kv(home=None):
    return SimpleNamespace(placement=SimpleNamespace(home=home, even=True))


def decodes(count, length):
    load = Load(1)
    for _ in range(count):
        load.add_decode(SimpleNamespace(length=length, kv=kv()))
    return load


ROWS = Work.decode(8, 1000)
DECODES = decodes(8, 1000)
SETTING = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
COST = StepCost(SETTING, Layout(kvp=1, tpa=8))
TARGET_S = 0.02


def prompt(left, length=0, home=None):
    return SimpleNamespace(prompt_left=left, length=length, kv=kv(home), is_scored=False)


def work(prompts, sizes, beside):
    beside = beside.fullest(None)
    for one, size in zip(prompts, sizes, strict=True):
        if size:
            chunk = Work.chunk(size, one.length)
            beside += chunk._replace(sampled_rows=int(size == one.prompt_left))
    return beside


@given(
    st.lists(
        st.builds(prompt, st.integers(1, 20_000), st.integers(0, 2_000_000), st.sampled_from([None, 0, 1])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([Load(1), DECODES, decodes(100, 100_000)]),
    st.floats(1e-4, 0.2),
)
def test_a_step_fits_its_target_and_one_with_an_eighth_more_does_not(prompts, beside, target_s):
    sizes = AdaptiveChunks(COST, 2048).sizes(prompts, beside, target_s)
    assert all(0 <= size <= one.prompt_left for one, size in zip(prompts, sizes, strict=True))
    total, left = sum(sizes), sum(one.prompt_left for one in prompts)
    assert min(4, left) <= total <= min(2048, left)
    target_s *= 1 if beside.decode_rows else 4
    if total > 4:
        assert COST.seconds(work(prompts, sizes, beside)) <= target_s
    if total < min(2048, left) and len(prompts) == 1:
        more = min(total + (4 if total < 16 else max(16, total // 8)), left)
        assert COST.seconds(work(prompts, [more], beside)) > target_s


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 2_000_000), st.floats(1e-4, 0.2)), min_size=2, max_size=6)
)
def test_sizes_do_not_depend_on_those_before(steps):
    rule = AdaptiveChunks(COST, 2048)
    for left, length, target_s in steps:
        alone = AdaptiveChunks(COST, 2048).sizes([prompt(left, length)], DECODES, target_s)
        assert rule.sizes([prompt(left, length)], DECODES, target_s) == alone


def test_a_size_that_stays_is_found_with_two_prices():
    asked = []

    class Counted:
        def seconds(self, work):
            asked.append(work)
            return COST.seconds(work)

    rule = AdaptiveChunks(Counted(), 2048)
    first = rule.sizes([prompt(10**6, 500_000)], DECODES, TARGET_S)
    asked.clear()
    assert rule.sizes([prompt(10**6, 500_000)], DECODES, TARGET_S) == first
    assert len(asked) == 2


def test_chunks_shrink_as_the_prefix_grows():
    prefixes = [0, 100_000, 500_000, 1_000_000, 4_000_000]
    sizes = [AdaptiveChunks(COST, 2048).sizes([prompt(10**6, at)], DECODES, TARGET_S)[0] for at in prefixes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 8 * sizes[-1] > 0


def test_prompts_get_on_where_decodes_alone_take_too_long():
    assert AdaptiveChunks(COST, 2048).sizes([prompt(500, 10)], decodes(1000, 100_000), 1e-6) == [4]
    assert AdaptiveChunks(COST, 2048).sizes([prompt(3, 10)], DECODES, 1e-6) == [3]


def test_of_a_ranks_prompts_one_at_the_most_is_left_in_the_middle():
    prompts = [prompt(300), prompt(10**6), prompt(400), prompt(10**6)]
    sizes = AdaptiveChunks(COST, 2048).sizes(prompts, DECODES, TARGET_S)
    assert sizes[0] == 300
    assert 0 < sizes[1] < 10**6
    assert sizes[2:] == [0, 0]


class Constant:
    def __init__(self, taken_s):
        self.taken_s = taken_s

    def seconds(self, work):
        return self.taken_s


@pytest.mark.parametrize("odd", [0.3, 3.9, 0.001])
def test_one_odd_step_at_first_says_nothing(odd):
    cost = CorrectedCost(Constant(0.1))
    cost.observe(ROWS, odd)
    for _ in range(3):
        cost.observe(ROWS, 0.1)
        assert cost.seconds(ROWS) == pytest.approx(0.1)


def test_a_cost_follows_what_steps_take_within_bounds():
    cost = CorrectedCost(Constant(0.1))
    cost.observe(ROWS, 0.4)
    assert cost.seconds(ROWS) == pytest.approx(0.1)
    cost.observe(ROWS, 0.4)
    assert cost.seconds(ROWS) == pytest.approx(0.4)  # soon: nobody may have calibrated this machine
    for _ in range(18):
        cost.observe(ROWS, 0.2)
    assert cost.seconds(ROWS) == pytest.approx(0.2)
    cost.observe(ROWS, 0.4)
    assert cost.seconds(ROWS) == pytest.approx(0.2 + (0.4 - 0.2) / 20)  # and slowly then
    for _ in range(200):
        cost.observe(ROWS, 0.2)
    assert cost.seconds(ROWS) == pytest.approx(0.2, rel=1e-3)
    assert cost.seconds(Work.chunk(10, 0)) == 0.1  # of another kind
    for _ in range(400):
        cost.observe(Work.chunk(10, 0), 3.0)
    assert cost.chunk_factor == pytest.approx(16.0, rel=1e-3)
    before = cost.decode_factor
    for odd_s in (0.0, 5.0):  # not measured; a machine that stood still
        cost.observe(ROWS, odd_s)
    cost.observe(Work(), 1e-5)  # a step that only says what has ended
    assert cost.decode_factor == before
