"""How things are measured: formulas against hand-made numbers, turns and medians, the model of one rank."""

import time
from pathlib import Path

import pytest
import torch

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat, native, partial_attention
from longhelix.measure import decode, model, prefill
from longhelix.measure.clock import KINDS, Clock
from longhelix.measure.configuration import configure
from longhelix.measure.formulas import attention_flops, causal_pairs, linear_flops, prefill_flops
from longhelix.measure.model import LongRequests, RankModel, fill, prefill_steps
from longhelix.measure.timing import Timing, interleave
from longhelix.spec import KV_DTYPES
from longhelix.spec.layout import Layout
from toy_model import attention_of

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="this measures the native kernels, which are not built here"),
]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config():
    return configure("builtin", Layout(), [64], weight_dtype=None, kv_dtype=None)


# What is counted


def test_causal_pairs_are_those_counted_one_by_one():
    for num_rows, context in ((1, 1), (1, 9), (4, 4), (3, 10)):
        assert causal_pairs(num_rows, context) == sum(range(context - num_rows + 1, context + 1))


def test_flops_are_two_for_each_multiplication():
    assert linear_flops(3, 5, 7) == 2 * 3 * 5 * 7
    assert attention_flops(3, 8, 4, 5) == 2 * (3 * 5 * 8 + 3 * 5 * 4)  # scores, then outputs


def test_prefill_counts_every_weight_that_the_model_declares(config):
    spec = config.spec
    norms = spec.hidden_size * (2 * spec.num_layers + 1)
    head = spec.hidden_size * spec.vocabulary.size
    attention = (
        4
        * attention_of(spec).heads.num_query_heads
        * attention_of(spec).head_size
        * spec.num_layers
        * sum(range(1, 11))
    )
    layers = config.weight_elements(0) - norms - 2 * head  # the packed embedding is kept beside the head
    assert prefill_flops(spec, 10) == 2 * 10 * layers + 2 * head + attention


def test_ranks_share_one_row_of_decode():
    ranks = [
        {"step_s": 0.5, "read_bytes": 10, "memory_bytes_per_s": 40, "peak_rss_bytes": 3, "formula_bytes": 2},
        {"step_s": 9.9, "read_bytes": 30, "memory_bytes_per_s": 60, "peak_rss_bytes": 7, "formula_bytes": 5},
    ]
    row = decode.combine(ranks)
    assert (row["step_s"], row["bytes_per_s"], row["fraction"]) == (0.5, 80, 0.8)
    assert (row["peak_rss_bytes"], row["formula_bytes"]) == (7, 5)


def test_ranks_share_one_row_of_prefill(config):
    row = prefill.combine([{"prompt": 10, "prefill_s": 2.0, "matmul_flops_per_s": 3e9}] * 2, config)
    assert row["tokens_per_s"] == 5
    assert row["mfu"] == pytest.approx(prefill_flops(config.spec, 10) / 2.0 / 6e9)


# How it is timed


def test_calls_take_turns_and_the_warm_up_does_not_count():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), time.sleep(0.002))}
    timings = interleave(calls, repeats=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert timings["b"].median_s >= 0.002


def test_calls_that_alternate_do_not_always_follow_the_same_one():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = interleave(calls, repeats=2, warm_up=1, alternate=True)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert list(timings) == ["a", "b", "c"]


def test_a_timing_is_a_median_with_quartiles():
    timing = Timing.of([1.0, 100.0, 3.0, 2.0, 4.0])
    assert (timing.median_s, timing.quartiles_s) == (3.0, (2.0, 4.0))
    assert timing.over(2).row("a_s") == {"a_s": 1.5, "a_s_quartiles": [1.0, 2.0], "spread": pytest.approx(2 / 3)}
    assert Timing.of([2.0]).over(2).row("a_s") == {"a_s": 1.0, "a_s_quartiles": None, "spread": None}


def test_the_clock_sees_the_kinds_of_calls_in_a_prefill_and_on_a_decodes_tape(config):
    rank = RankModel.join(config, 0, Path())
    runner = rank.runner(48)
    with Clock() as clock:
        for step in prefill_steps(rank, 0, (1,) * 48):
            runner.execute(step)
    assert clock.seconds["attention_s"] > 0 < clock.seconds["products_s"]
    request = LongRequests(rank, 48)
    request.step()
    with Clock() as clock:
        start = time.perf_counter()
        request.step()
        total_s = time.perf_counter() - start
    kinds = clock.mean(total_s, 1)
    assert len(request.runner.layers._tapes) == 1
    assert kinds["attention_s"] > 0 < kinds["products_s"]
    assert kinds["outside_s"] > 0
    assert sum(kinds.values()) == pytest.approx(total_s)
    assert set(kinds) == {*KINDS, "outside_s"}
    request.step()
    assert clock.mean(total_s, 1) == kinds


def test_a_long_request_takes_the_same_step_again_and_again(config):
    rank = RankModel.join(config, 0, Path())
    request = LongRequests(rank, 50)
    sequence = request.runner.running.by_id[0]
    tokens = set()
    for _ in range(2):
        request.step()
        assert (sequence.length, sequence.local_length) == (50, 50)
        tokens.add(sequence.last_token)
    assert len(tokens) == 1  # greedy, from the same keys and values


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_filled_keys_and_values_are_finite_and_not_all_alike(dtype, monkeypatch):
    monkeypatch.setattr(model, "_FILL_BLOCKS", 2)  # so that five blocks are copies of two
    pool = KVPool([{"kv": KVFormat.choose(dtype, 16, 2, 32, 32, CPU)}] * 2, 5, CPU)
    for layer in pool.entries():
        layer.values.fill_(255)  # a NaN in every dtype that has one
    fill(pool)
    for layer in pool.entries():
        q_TqC = torch.randn(1, 4, 32)
        table = torch.arange(5), torch.tensor([[0, 5]]), torch.tensor([0, 1]), torch.tensor([80])
        out_TqC, lse_Tq = partial_attention(q_TqC, layer, *table, 0.2)
        assert out_TqC.isfinite().all()
        assert lse_Tq.isfinite().all()
        assert out_TqC.std() > 0.01
