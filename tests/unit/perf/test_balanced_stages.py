"""Stages with the embedding or the head have fewer layers, where these take a layer's time."""

from dataclasses import replace

import pytest

from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.stages import balanced
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

CPU, H100 = load_system("cpu"), load_system("h100")


def setting(model, system, vocab_size=None):
    spec = load_model(model)
    size = spec.vocabulary.size if vocab_size is None else vocab_size
    sized = replace(spec, vocabulary=replace(spec.vocabulary, size=size))
    return Setting(sized, system, Dtypes("bfloat16", "bfloat16"))


def test_layouts_that_say_their_stages_or_have_one_stay():
    some = setting("llama-3-8b", H100)
    for layout in (Layout(kvp=2), Layout(pp=2, stage_layers=[1, 31])):
        assert balanced(some, layout) is layout


@pytest.mark.parametrize("pp", [2, 3, 5, 32])
@pytest.mark.parametrize("vocab_size", [1000, 128_256, 4_000_000])
def test_all_layers_are_dealt_and_no_stage_has_none(pp, vocab_size):
    stages = balanced(setting("llama-3-8b", H100, vocab_size=vocab_size), Layout(tpa=2, pp=pp)).stage_layers
    assert (len(stages), sum(stages)) == (pp, 32)
    assert min(stages) >= 1


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    few, many = (
        balanced(setting("llama-3-8b", H100, vocab_size=size), Layout(pp=4)).stage_layers for size in (1000, 2_000_000)
    )
    assert few == (8, 8, 8, 8)
    assert many[-1] < 4
    assert max(many[:-1]) - min(many[:-1]) <= 1


def test_the_rest_of_a_layout_stays_as_it_is():
    given = Layout(kvp=2, tpa=2, pp=2, ffn_replicas=2)
    found = balanced(setting("llama-3-8b", CPU), given)
    assert Layout(found.kvp, found.tpa, found.tpf, found.ep, found.pp, found.ffn_replicas) == given
