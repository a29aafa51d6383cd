"""The driver over an engine that fails: it starts again as often as it may be, and the reasons are told."""

import asyncio
import threading

import pytest

from longhelix.errors import EngineError
from longhelix.serve.driver import Driver, Limits
from longhelix.serve.engine_thread import Recovery
from longhelix.serve.refusals import RestartingError

pytestmark = pytest.mark.unit

LIMITS = Limits(8, 1000)


class Engine:
    """Has nothing to do. Its ranks are gone once, and do not start again so many times."""

    has_work = is_saving = has_failed = False

    def __init__(self, unwilling):
        self.unwilling = unwilling
        self.starts, self.closed = 0, False
        self.may_start = threading.Event()

    def watch(self):
        if self.starts == 0:
            self.has_failed = True
            raise EngineError("rank 1 is gone")

    def restart(self, failures, *, on_load, on_warm_up):
        assert self.may_start.wait(10)
        on_load(0.5)
        on_warm_up(0.5)
        self.starts += 1
        if self.starts <= self.unwilling:
            raise EngineError("there is no memory")
        self.has_failed = False

    def close(self):
        self.closed = True


async def until(seen):
    async with asyncio.timeout(10):
        while not seen():
            await asyncio.sleep(0.01)


def run(engine, check):
    async def whole():
        driver = Driver(engine, LIMITS, Recovery(restarts=3))
        driver.start()
        try:
            await check(driver)
        finally:
            engine.may_start.set()
            await driver.close()
        assert engine.closed

    asyncio.run(whole())


@pytest.mark.parametrize("unwilling", [0, 2])
def test_ranks_that_do_not_start_are_started_again(unwilling):
    engine, told = Engine(unwilling), []

    async def check(driver):
        driver.on_restart = told.append
        await until(lambda: driver.restarting)
        with pytest.raises(RestartingError, match="rank 1 is gone"):
            driver.check_room([])
        engine.may_start.set()
        await until(lambda: driver.restarts == unwilling + 1 and not driver.restarting)
        driver.check_room([])

    run(engine, check)
    again = "rank 1 is gone; and the ranks did not start again: there is no memory"
    assert told[1:] == [again] * unwilling


def test_ranks_that_start_too_seldom_end_it_with_both_reasons():
    engine = Engine(3)

    async def check(driver):
        engine.may_start.set()
        await until(lambda: driver.failure)
        assert driver.restarts == engine.starts == 3
        for reason in ("rank 1 is gone", "there is no memory"):
            assert reason in driver.failure
        with pytest.raises(EngineError):
            driver.check_room([])

    run(engine, check)


def test_a_stop_does_not_wait_for_ranks_that_start():
    engine, failures = Engine(0), []

    async def check(driver):
        driver.on_failure = failures.append
        await until(lambda: driver.restarting)
        closing = asyncio.create_task(driver.close())
        await asyncio.sleep(0)  # it is closing from here on
        engine.may_start.set()
        await closing
        assert (engine.starts, failures) == (0, [])

    run(engine, check)
