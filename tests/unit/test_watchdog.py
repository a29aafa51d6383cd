"""The watchdog on steps: when it barks, and what it says."""

from dataclasses import replace

import pytest

from longhelix.engine import watchdog as watchdog_module
from longhelix.engine.config import resolve
from longhelix.engine.watchdog import Progress, Watchdog
from longhelix.errors import EngineError
from longhelix.layout import Layout
from longhelix.models.checkpoint import open_checkpoint
from longhelix.perf.work import Work

pytestmark = pytest.mark.unit

DECODE, LONG_CHUNK = Work.decode(1, 100), Work.chunk(512, 1_000_000)


@pytest.fixture(scope="module")
def config():
    return resolve(
        open_checkpoint("builtin"), Layout(kvp=2), dtype=None, weight_dtype=None, kv_dtype=None, max_model_len=None,
        rope_scaling=None, kv_cache_tokens=1024, chunk_tokens=512, block_tokens=16, placement="striped",
        growth_limit_tokens=4096, device="cpu",
    )  # fmt: skip


def started(config, work=DECODE):
    watchdog = Watchdog(config)
    watchdog.submitted(7, work)
    return watchdog


def silent_s(watchdog, done=(), turn_s=0.25):
    """Seconds that pass, in turns, until it barks."""
    for turn in range(1000):
        try:
            watchdog.check(7, set(done))
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
    """For a minute, each rank once in four seconds: by its collectives, its end, or any other message."""
    watchdog = started(config)
    for turn in range(15):
        watchdog.heard(turn % 2, Progress(7, turn + 1, "all-reduce"))
        watchdog.waited(2.0)
        watchdog.check(7, set())
        watchdog.got_on()
        watchdog.waited(2.0)
        watchdog.check(7, set())
    # Signs of life that say the same again are none.
    watchdog.heard(0, Progress(7, 15, "all-reduce"))
    assert silent_s(watchdog)[0] < 5


@pytest.mark.parametrize(
    ("progress", "done", "words"),
    [
        (
            [Progress(7, 3, "all-reduce 3 over ranks 0, 1"), Progress(7, 2)],
            (),
            "rank 1 stands still in step 7, outside of collectives, after 2 collectives: nothing has got on for 5.",
        ),
        (
            [Progress(7, 3, "all-reduce 3 over ranks 0, 1"), Progress(7, 2)],
            (),
            "rank 0 is in all-reduce 3 over ranks 0, 1",
        ),
        (
            [Progress(7, 4, "all-reduce 4 over ranks 0, 1"), Progress(0, 3)],
            (1,),
            "rank 0 stands still in step 7, in all-reduce 4 over ranks 0, 1: ",
        ),
        ([Progress(7, 4, "all-reduce 4 over ranks 0, 1"), Progress(0, 3)], (1,), "; rank 1 has done the step"),
        ([Progress(7, 4, "exchange 4"), Progress(7, 3, "all-reduce 3")], (), "rank 1 stands still in step 7"),
    ],
)
def test_it_names_the_rank_that_holds_the_others_up(config, progress, done, words):
    watchdog = started(config)
    for rank, one in enumerate(progress):
        watchdog.heard(rank, one)
    assert words in silent_s(watchdog, done)[1]


def test_compilers_and_reference_kernels_have_more_time(config, monkeypatch):
    compiled_s, _ = silent_s(started(replace(config, execution="compiled")), turn_s=5)
    assert 605 <= compiled_s < 650
    native_s, _ = silent_s(started(config, LONG_CHUNK), turn_s=100)
    monkeypatch.setattr(watchdog_module, "has_native_kernels", lambda: False)
    reference_s, _ = silent_s(started(config, LONG_CHUNK), turn_s=100)
    assert reference_s > 50 * native_s
