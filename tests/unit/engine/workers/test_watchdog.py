"""The watchdog on steps: when it barks, and what it says."""

import pytest

from builtin import builtin
from longhelix.compute.kernels import native
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.rank import load_model, new_pool, new_runner
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.workers import watchdog as watchdog_module
from longhelix.engine.workers.step_cost import step_cost
from longhelix.engine.workers.watchdog import Watchdog
from longhelix.errors import EngineError
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import Chunk, InitialKV, NewSequence, SequenceChanges, Step
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

DECODE, LONG_CHUNK = Work.decode(1, 100), Work.chunk(512, 1_000_000)


@pytest.fixture(scope="module")
def config():
    return resolved(Layout(kvp=2), block_tokens=16)


def resolved(layout, block_tokens):
    return resolve(builtin(), layout, EngineOptions(kv_cache_tokens=1024, block_tokens=block_tokens, device="cpu"))


def started(config, work=DECODE, packed=True, compiles=False):
    watchdog = Watchdog(config)
    watchdog.ready(step_cost(config, overlaps=False), packed, compiles)
    watchdog.submitted(7, work)
    return watchdog


def silent_s(watchdog, done=(), turn_s=0.25):
    """Seconds that pass, in turns, until it barks."""
    for turn in range(1000):
        try:
            watchdog.check(7, (0, 1), set(done))
        except EngineError as error:
            return turn * turn_s, str(error)
        watchdog.waited(turn_s)
    return None


def test_the_limit_follows_the_steps_prediction(config):
    short_s, _ = silent_s(started(config))
    long_s, _ = silent_s(started(config, LONG_CHUNK), turn_s=5)
    assert 5 <= short_s < 7
    assert 60 < long_s < 3600


def test_what_gets_on_is_left_alone(config):
    """For a minute and more, once in two seconds: by collectives, layers, an end, or any other message."""
    watchdog = started(config)
    for turn in range(15):
        watchdog.on_heartbeat(turn % 2, Progress(7, turn + 1, "all-reduce"))
        watchdog.waited(2.0)
        watchdog.check(7, (0, 1), set())
        watchdog.on_heartbeat(turn % 2, Progress(7, turn + 1, "all-reduce", layers=turn))
        watchdog.waited(2.0)
        watchdog.check(7, (0, 1), set())
        watchdog.made_progress(turn % 2)
        watchdog.waited(2.0)
        watchdog.check(7, (0, 1), set())
    # Signs of life that say the same again are none.
    watchdog.on_heartbeat(0, Progress(7, 15, "all-reduce", layers=14))
    assert silent_s(watchdog)[0] < 5


@pytest.mark.parametrize(
    ("progress", "done", "words"),
    [
        (
            [Progress(7, 3, "all-reduce 3 over ranks 0, 1"), Progress(7, 2)],
            (),
            "rank 1 is stuck in step 7, outside collectives, after 2 collectives: no progress for 5.",
        ),
        (
            [Progress(7, 3, "all-reduce 3 over ranks 0, 1"), Progress(7, 2)],
            (),
            "rank 0 is in all-reduce 3 over ranks 0, 1",
        ),
        (
            [Progress(7, 4, "all-reduce 4 over ranks 0, 1"), Progress(0, 3)],
            (1,),
            "rank 0 is stuck in step 7, in all-reduce 4 over ranks 0, 1: ",
        ),
        ([Progress(7, 4, "all-reduce 4 over ranks 0, 1"), Progress(0, 3)], (1,), "; rank 1 has finished the step"),
        ([Progress(7, 4, "exchange 4"), Progress(7, 3, "all-reduce 3")], (), "rank 1 is stuck in step 7"),
    ],
)
def test_it_names_the_rank_that_holds_the_others_up(config, progress, done, words):
    watchdog = started(config)
    for rank, one in enumerate(progress):
        watchdog.on_heartbeat(rank, one)
    assert words in silent_s(watchdog, done)[1]


def test_who_had_nothing_to_do_is_not_blamed_for_that(config):
    """Rank 0 is busy for a minute. Then rank 1 is given a step."""
    watchdog = started(config, LONG_CHUNK)
    for turn in range(60):
        watchdog.on_heartbeat(0, Progress(7, turn))
        watchdog.waited(1.0)
        watchdog.check(7, (0,), set())
    watchdog.submitted(8, DECODE)
    watchdog.given((1,))
    watchdog.check(8, (1,), set())
    watchdog.waited(20.0)
    with pytest.raises(EngineError, match=r"^rank 1 is stuck in step 8, .* 20.0 s, and the limit is 5"):
        watchdog.check(8, (1,), set())


def test_a_start_that_stands_is_ended_and_one_that_gets_on_is_not(config, monkeypatch):
    monkeypatch.setattr(watchdog_module, "START_S", 30.0)
    watchdog = Watchdog(config)
    for turn in range(10):  # warm-up steps
        watchdog.on_heartbeat(0, Progress(turn, turn))
        watchdog.waited(20.0)
        watchdog.check_start({1})
    watchdog.waited(20.0)
    with pytest.raises(EngineError, match=r"^rank 0 is stuck in its start, .* after 9 .*; rank 1 has started$"):
        watchdog.check_start({1})


def test_an_answer_waits_for_what_is_in_flight_and_no_longer(config):
    watchdog = started(config, LONG_CHUNK)
    watchdog.waited(20.0)
    watchdog.check_answer({1})
    watchdog.finished(7)
    with pytest.raises(EngineError, match=r"^ranks \[1\] do not answer: .* 20.0 s, .* is 5.0 s.*; rank 1 is outside"):
        watchdog.check_answer({1})


def test_an_answer_that_waits_for_a_disk_has_longer(config):
    watchdog = started(config)
    watchdog.finished(7)
    watchdog.waited(20.0)
    watchdog.check_answer({1}, patience_s=60.0)
    watchdog.waited(45.0)
    with pytest.raises(EngineError, match=r"^ranks \[1\] do not answer: .* 65.0 s, and the limit is 60.0 s"):
        watchdog.check_answer({1}, patience_s=60.0)


def test_compilers_and_reference_kernels_have_more_time(config):
    compiled_s, _ = silent_s(started(config, compiles=True), turn_s=5)
    assert 605 <= compiled_s < 650
    native_s, _ = silent_s(started(config, LONG_CHUNK), turn_s=100)
    reference_s, _ = silent_s(started(config, LONG_CHUNK, packed=False), turn_s=100)
    assert reference_s > 50 * native_s


@pytest.mark.parametrize(
    ("block_tokens", "packed"),
    [
        pytest.param(8, False, marks=pytest.mark.slow),
        pytest.param(16, True, marks=pytest.mark.skipif(native.module is None, reason="no native kernels")),
    ],
)
def test_a_rank_says_whether_its_kernels_are_references_and_counts_layers(block_tokens, packed):
    """Layers that run op by op: all of a chunk, and of decode steps those that are on no tape."""
    config = resolved(Layout(), block_tokens)
    model = load_model(config, Mesh.build(config.layout, 0))
    runner = new_runner(config, model.mesh, model, new_pool(config, 0, 4))
    new = NewSequence(0, SamplingParams(), seed=0, capacity_tokens=10, kv=InitialKV((2,), spread=True))
    chunk = Chunk(0, bytes(12), (Block(0, 0),), sample=True)
    layers = []
    for step in (
        Step(1, changes=SequenceChanges(new=(new,)), chunks=(chunk,)),
        Step(2, changes=SequenceChanges(joining=(0,))),
        Step(3),
    ):
        runner.execute(step)
        layers.append(runner.progress().layers)
    assert runner.execution.capabilities.packed == packed
    assert layers == [config.spec.num_layers * steps for steps in ((1, 2, 2) if packed else (1, 2, 3))]
