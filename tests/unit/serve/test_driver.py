"""The driver over an engine that fails: it starts again as often as it may be, and the reasons are told."""

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from longhelix.errors import EngineError, UserError
from longhelix.serve import engine_thread
from longhelix.serve.driver import Driver, Limits
from longhelix.serve.engine_thread import Recovery
from longhelix.serve.refusals import RestartingError

pytestmark = pytest.mark.unit

LIMITS = Limits(8, 1000)
NO_MEMORY = EngineError("there is no memory")
NO_PROCESS = OSError(12, "Cannot allocate memory")
OF_RANKS = UserError("rank 0 has 1 GB left: set --kv-cache-tokens to less", "out_of_memory")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(engine_thread, "_PAUSE_S", 0.01)


class Engine:
    """Has nothing to do. Its ranks are gone once, and do not start again for these reasons first."""

    has_work = is_saving = has_failed = False

    def __init__(self, unwilling):
        self.unwilling = list(unwilling)
        self.starts_s, self.closed = [], False
        self.may_start = threading.Event()

    def watch(self):
        if not self.starts_s:
            self.has_failed = True
            raise EngineError("rank 1 is gone")

    def restart(self, failures, *, on_load, on_warm_up):
        assert self.may_start.wait(10)
        on_load(0.5)
        on_warm_up(0.5)
        self.starts_s.append(time.monotonic())
        if self.unwilling:
            raise self.unwilling.pop(0)
        self.has_failed = False

    def close(self):
        self.closed = True


async def until(seen):
    async with asyncio.timeout(10):
        while not seen():
            await asyncio.sleep(0.01)


def run(engine, check, restarts=3):
    async def whole():
        driver = Driver(engine, LIMITS, Recovery(restarts=restarts))
        driver.start()
        try:
            await check(driver)
        finally:
            engine.may_start.set()
            await driver.close()
        assert engine.closed

    asyncio.run(whole())


@pytest.mark.parametrize("unwilling", [[], [NO_MEMORY] * 2, [OF_RANKS] * 2, [NO_PROCESS] * 2])
def test_ranks_that_do_not_start_are_started_again(unwilling):
    engine, told = Engine(unwilling), []

    async def check(driver):
        driver.restart_listener = told.append
        await until(lambda: driver.restarting)
        with pytest.raises(RestartingError, match="has failed and is restarting"):
            driver.check_room([])
        engine.may_start.set()
        await until(lambda: driver.restarts == len(unwilling) + 1 and not driver.restarting)
        driver.check_room([])

    run(engine, check)
    assert told[0] == "rank 1 is gone"
    for again, error in zip(told[1:], unwilling, strict=True):
        assert again.startswith("rank 1 is gone; and the ranks did not start again: ")
        assert again.endswith(str(error))


def test_each_pause_before_a_start_is_longer_than_the_one_before(monkeypatch):
    monkeypatch.setattr(engine_thread, "_PAUSE_S", 0.05)
    monkeypatch.setattr(engine_thread, "_LONGEST_PAUSE_S", 0.15)
    engine = Engine([NO_MEMORY] * 4)

    async def check(driver):
        engine.may_start.set()
        await until(lambda: driver.restarts == 5 and not driver.restarting)

    run(engine, check, restarts=5)
    pauses_s = [after - before for before, after in pairwise(engine.starts_s)]
    assert all(pause_s >= least_s for pause_s, least_s in zip(pauses_s, (0.05, 0.1, 0.15, 0.15), strict=True))


def test_a_stop_does_not_wait_for_a_pause(monkeypatch):
    monkeypatch.setattr(engine_thread, "_PAUSE_S", 600.0)
    engine, failures = Engine([OF_RANKS]), []

    async def check(driver):
        driver.failure_listener = failures.append
        engine.may_start.set()
        await until(lambda: driver.restarts == 2)
        async with asyncio.timeout(10):
            await driver.close()
        assert (len(engine.starts_s), failures) == (1, [])

    run(engine, check)


def test_ranks_that_start_too_seldom_end_it_with_both_reasons():
    engine = Engine([NO_MEMORY] * 3)

    async def check(driver):
        engine.may_start.set()
        await until(lambda: driver.failure)
        assert driver.restarts == len(engine.starts_s) == 3
        for reason in ("rank 1 is gone", "there is no memory"):
            assert reason in driver.failure
        with pytest.raises(EngineError):
            driver.check_room([])

    run(engine, check)


def test_a_stop_does_not_wait_for_ranks_that_start():
    engine, failures = Engine([]), []

    async def check(driver):
        driver.failure_listener = failures.append
        await until(lambda: driver.restarting)
        closing = asyncio.create_task(driver.close())
        await asyncio.sleep(0)  # it is closing from here on
        engine.may_start.set()
        await closing
        assert (engine.starts_s, failures) == ([], [])

    run(engine, check)
