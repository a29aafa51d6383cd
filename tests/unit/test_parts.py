"""The parts that a step attends in: chosen by the cost model, or as many as were asked for and the batch has."""

from dataclasses import replace

import pytest

from longhelix.bench.suite import configure
from longhelix.engine.parts import _PART_S, Parts
from longhelix.kv.blocks import Block
from longhelix.layout import Layout
from longhelix.perf.attention import overlap
from longhelix.perf.layouts import Layouts
from longhelix.perf.predictor import Lengths
from longhelix.perf.setting import Setting
from longhelix.perf.work import Work
from longhelix.presets import load_system
from longhelix.request import SequenceWork, Step

pytestmark = pytest.mark.unit

BUILTIN = configure("builtin", Layout(kvp=2), [8192], weight_dtype=None, kv_dtype=None)
SLOW_LINK = load_system("cpu").replaced({"scale_out.bytes_per_s": 5e6, "scale_out.latency_s": 1e-4}, "test")
SLOW_LATENCY = load_system("cpu").replaced({"scale_out.latency_s": 1.0}, "test")


def step(*rows, id=0, ended=()):
    """A step of `rows` for sequences 0, 1, ..."""
    work = tuple(SequenceWork(number, count, (Block(0, 0),), True) for number, count in enumerate(rows))
    return Step(id, (), work, ended, most_tokens=0)


def parts(system=SLOW_LINK, overlaps=True, **changes):
    return Followed(Parts(replace(BUILTIN, system=system, **changes), overlaps))


class Followed:
    """Parts of steps in order, each with what it computes, as the pool asks for them."""

    def __init__(self, parts):
        self._parts, self._lengths = parts, Lengths()

    def of(self, step):
        return self._parts.of(step, self._lengths.advance(step))


def decode_parts(chosen, sequences, context):
    """Parts of a decode step of `sequences` that hold `context` tokens each."""
    chosen.of(step(*(context,) * sequences))
    return chosen.of(step(*(1,) * sequences, id=1))


def test_more_parts_where_a_slow_link_and_long_contexts_take_similar_time():
    assert decode_parts(parts(), 8, 100_000) > 1
    assert decode_parts(parts(), 8, 100_000) <= 8


@pytest.mark.parametrize(
    ("sequences", "context", "system"),
    [(1, 100_000, SLOW_LINK), (8, 16, SLOW_LINK), (8, 100_000, SLOW_LATENCY)],
    ids=["one request", "short attention", "fixed cost beyond attention"],
)
def test_one_exchange_where_a_second_does_not_pay(sequences, context, system):
    assert decode_parts(parts(system), sequences, context) == 1


def test_ranks_that_share_memory_and_compiled_layers_exchange_once():
    assert decode_parts(parts(overlaps=False), 8, 100_000) == 1
    assert decode_parts(parts(overlaps=False, hop_b=4), 8, 100_000) == 1
    assert decode_parts(parts(execution="compiled", hop_b=4), 8, 100_000) == 1


def test_what_was_asked_for_is_a_limit():
    assert decode_parts(parts(hop_b=1), 8, 100_000) == 1
    assert decode_parts(parts(hop_b=4), 8, 16) == 4
    assert decode_parts(parts(hop_b=4), 3, 16) == 3
    asked = parts(hop_b=4)
    assert asked.of(step(200)) == 3
    assert asked.of(step(100, id=1)) == 1
    assert asked.of(step(100, 1, id=2)) == 1
    assert asked.of(step(id=3, ended=(0, 1))) == 1


def test_a_long_chunk_is_cut_but_not_where_cuda_graphs_pad_it():
    assert parts(hop_b=4).of(step(512)) == 4
    assert parts(hop_b=4, device="cuda").of(step(512)) == 1
    assert parts(hop_b=4, device="cuda", execution="eager").of(step(512)) == 4


def test_the_choice_is_the_cost_models():
    """The same seconds by hand: no other number of parts takes fewer."""
    chosen = decode_parts(parts(), 8, 100_000)
    system = SLOW_LINK.replaced({"part_fixed_share": 1.0, "scale_up.ranks": 1}, "test")
    setting = Setting(BUILTIN.spec, system, "bfloat16", "bfloat16")
    cut = overlap(setting, Layouts.of([Layout(kvp=2)]), Work.decode(8, 100_001))
    # Every part takes a rank's thread some time beside its kernels.
    seconds = {count: cut.seconds(float(count))[0] + _PART_S * count for count in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == chosen


def test_lengths_follow_steps_and_end_with_their_sequences():
    chosen = parts()
    assert decode_parts(chosen, 8, 100_000) > 1
    again = step(*(1,) * 8, id=2, ended=tuple(range(8)))
    assert chosen.of(again) == 1
