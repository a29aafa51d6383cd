"""The line before a thread: its order, its bound, and what leaves it."""

import asyncio
import threading

import pytest

from longhelix.serve.line import Line
from longhelix.serve.refusals import OverloadedError

pytestmark = pytest.mark.unit


def test_what_waits_comes_one_after_the_other_and_no_more_than_may():
    async def run():
        line, may_go, done = Line("guides", 3), threading.Event(), []

        def do(number):
            assert may_go.wait(30)
            done.append(number)
            return -number

        waiting = [asyncio.create_task(line.run(do, number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="3 requests with guides wait already"):
            await line.run(do, 3)
        may_go.set()
        assert await asyncio.gather(*waiting) == [0, -1, -2]
        assert done == [0, 1, 2]
        assert await line.run(do, 4) == -4

    asyncio.run(run())


def test_whoever_goes_or_fails_makes_room():
    async def run():
        line, may_go, done = Line("images", 2), threading.Event(), []
        first = asyncio.create_task(line.run(may_go.wait, 30))
        second = asyncio.create_task(line.run(done.append, "second"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(line.run(int, "no number"))
        await asyncio.sleep(0)
        may_go.set()
        assert await first
        with pytest.raises(ValueError, match="no number"):
            await third
        assert await line.run(int, "7") == 7
        assert done == []

    asyncio.run(run())
