"""The table of measured gains: the published numbers, those of the default plan, and one changed assumption per row."""

import pytest

from longhelix.cli.figures import _system
from longhelix.figures.measured import measured
from longhelix.perf.setting import Dtypes, Setting
from longhelix.plan.answer import answer
from longhelix.plan.question import Question
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

PRESET = Setting(load_model("deepseek-r1"), load_system("gb300"), Dtypes("nvfp4", "nvfp4"))


@pytest.fixture(scope="module")
def rows():
    return {row[0].split(",")[0].split(":")[0]: row[1:] for row in measured(PRESET, _system("gb200")).rows}


def test_the_first_row_is_what_was_published(rows):
    """TensorRT-LLM, tech blog 22."""
    assert next(iter(rows.values())) == (1.8, 32.0)


def test_the_second_row_is_the_plans_own_answer(rows):
    headline = answer(Question(PRESET, 1_000_000, 64)).headline
    assert rows["default plan"] == (headline.interactivity, headline.throughput)


def test_each_assumption_moves_the_gains_as_it_must(rows):
    plain = rows["as measured"]
    # Where a part of an exchange pays all its fixed costs again, nothing can be hidden at batch 1.
    assert plain[0] <= rows["default plan"][0]
    # The baseline reads each latent on every rank, which takes as long in any dtype: its attention computes less.
    assert rows["attention in bfloat16"][1] < plain[1] < rows["attention in FP4"][1]
    assert rows["kernels of 4 us"][0] < plain[0] < rows["collectives of 2.5 us"][0]
    assert rows["no host work"][0] > plain[0]
    assert rows["KV in FP8"][1] < plain[1]


def test_no_constant_of_the_preset_is_fitted():
    assert not [source for source in PRESET.system.sources.values() if source.startswith("fitted")]
