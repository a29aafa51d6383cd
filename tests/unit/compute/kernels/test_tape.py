"""Tapes: that they do again what ran, know when they cannot, and write the times of their marks."""

import ctypes
import threading
import time

import pytest
import torch

from asserts import fails_an_assert
from longhelix.compute.kernels import PANELS, linear, make_weight, native
from longhelix.compute.kernels.packed_rows import encoded, ordered
from longhelix.compute.kernels.tape import Tape

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="tapes hold native calls, which are not built here"),
]

SIZE = 32


@pytest.fixture
def weight():
    return make_weight(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)), "float32")


def recorded(call):
    tape = Tape()
    with tape:
        result = call()
    return tape, result


def mark(ns):
    native.module.mark(ctypes.addressof(ns))


def test_a_tape_reads_what_its_memory_has_when_it_runs(weight):
    x_TX = torch.randn(3, SIZE)
    tape, twice_TX = recorded(lambda: linear(linear(x_TX, weight), weight))
    first = twice_TX.clone()
    assert torch.equal(first, linear(linear(x_TX, weight), weight))  # recording changes nothing
    assert len(tape._calls) == 2
    x_TX.copy_(torch.randn(3, SIZE))
    expected = linear(linear(x_TX, weight), weight)
    assert torch.equal(twice_TX, first)
    tape.run()
    assert torch.equal(twice_TX, expected)
    assert not torch.equal(twice_TX, first)


def test_a_tape_holds_products_that_take_their_inputs_in_an_order():
    rows = ordered(encoded(torch.randn(SIZE, 64), "int4-g32"), torch.arange(64) % 2, slice(0, 64), "int4-g32", 64)
    weight = PANELS.of_rows(rows, 1)
    x_TX, norm = torch.randn(3, 64), torch.rand(64)
    tape, result = recorded(lambda: linear(x_TX, weight, norm=norm, norm_eps=1e-6))
    assert tape.complete
    wanted = torch.nn.functional.linear(torch.nn.functional.rms_norm(x_TX, (64,), norm, 1e-6), rows.numbers())
    torch.testing.assert_close(result, wanted)
    result.zero_()
    tape.run()
    torch.testing.assert_close(result, wanted)


def test_memory_between_its_calls_lives_as_long_as_the_tape(weight):
    x_TX = torch.randn(64, SIZE)
    tape, result = recorded(lambda: linear(linear(x_TX, weight), weight))
    expected = result.clone()
    others = [torch.full((64, SIZE), float("nan")) for _ in range(50)]  # would take what was freed
    result.zero_()
    tape.run()
    assert torch.equal(result, expected)
    assert all(other.isnan().all() for other in others)


@pytest.mark.parametrize(
    ("between", "complete"),
    [
        (lambda x: x, True),
        (lambda x: x.view(-1, SIZE)[1:].detach(), True),
        (lambda x: x.unflatten(1, (2, -1)).flatten(1), True),
        (lambda x: x + 1, False),
        (lambda x: x.clone(), False),
        (lambda x: x.t().contiguous().t(), False),
        (lambda x: x.t().flatten().view(-1, SIZE), False),  # a flattening that copies
    ],
    ids=["nothing", "views", "flatten", "add", "clone", "contiguous", "copying flatten"],
)
def test_a_tape_knows_what_it_cannot_hold(weight, between, complete):
    x_TX = torch.randn(SIZE, SIZE)
    with torch.inference_mode():
        tape, result = recorded(lambda: linear(between(linear(x_TX, weight)), weight))
    assert torch.equal(result, linear(between(linear(x_TX, weight)), weight))
    assert tape.complete == complete
    if not complete:
        with fails_an_assert(match="lacks what ran outside"):
            tape.run()


def test_an_error_ends_the_recording(weight):
    tape = Tape()

    def fail():
        with tape:
            linear(torch.randn(1, SIZE), weight)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    linear(torch.randn(1, SIZE), weight)
    assert len(tape._calls) == 1


def test_a_recording_that_fails_to_begin_records_nothing(monkeypatch):
    tape = Tape()
    monkeypatch.setattr(type(tape._watch), "__enter__", lambda watch: 1 / 0)
    with pytest.raises(ZeroDivisionError), tape:
        pass
    mark(ctypes.c_int64())
    assert len(tape._calls) == 0


def test_what_other_threads_call_meanwhile_is_not_on_it(weight):
    tape, other = Tape(), threading.Thread(target=lambda: mark(ctypes.c_int64()))
    with tape:
        linear(torch.randn(1, SIZE), weight)
        other.start()
        other.join()
    assert len(tape._calls) == 1


def test_marks_have_the_time_of_each_run_in_order(weight):
    marks = [ctypes.c_int64() for _ in range(3)]
    x_TX = torch.randn(4, SIZE)

    def marked():
        mark(marks[0])
        first = linear(x_TX, weight)
        mark(marks[1])
        result = linear(first, weight)
        mark(marks[2])
        return result

    start_ns = time.monotonic_ns()
    tape, _ = recorded(marked)
    for _ in range(3):
        end_ns = time.monotonic_ns()
        times_ns = [ns.value for ns in marks]
        assert start_ns <= times_ns[0] < times_ns[1] < times_ns[2] <= end_ns
        start_ns = end_ns
        tape.run()
    assert tape.complete
    assert len(tape._calls) == 5


def test_seconds_count_calls_on_and_off_tapes_while_they_are_asked_for(weight):
    x_TX = torch.randn(64, SIZE)
    tape, _ = recorded(lambda: linear(x_TX, weight))
    before = native.module.seconds()
    tape.run()
    assert native.module.seconds() == before
    native.module.time_calls(True)
    try:
        tape.run()
        on_tape = native.module.seconds()
        linear(x_TX, weight)
    finally:
        native.module.time_calls(False)
    after = native.module.seconds()
    assert before["products"] < on_tape["products"] < after["products"]
    assert {name: after[name] - before[name] for name in after if name != "products"} == {
        "attention": 0, "rotation": 0, "collectives": 0, "other": 0,
    }  # fmt: skip
