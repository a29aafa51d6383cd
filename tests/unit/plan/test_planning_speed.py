"""How long plans take, by the processor's time, which a busy machine changes little, and how much memory a sweep."""

import time

import pytest

from longhelix.measure.bench import planner
from longhelix.perf.setting import Dtypes, Setting
from longhelix.plan.answer import answer
from longhelix.plan.question import MOST_GPUS, Question
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("model", ["deepseek-r1", "deepseek-v3.2", "qwen3-next-80b-a3b", "llama-3.1-405b"])
def test_the_most_gpus_are_planned_within_fifteen_seconds(model):
    setting = Setting(load_model(model), load_system("gb300"), Dtypes("fp8", "fp8"))
    start_s = time.process_time()
    found = answer(Question(setting, 1_000_000, MOST_GPUS, ttl_s=0.03))
    assert time.process_time() - start_s < 15
    assert found.configurations > 300_000


def test_a_million_configurations_take_less_than_a_gigabyte():
    row = planner._program(planner._SWEEP)
    assert row["configurations"] > 1_000_000
    assert row["peak_bytes"] < 1e9
