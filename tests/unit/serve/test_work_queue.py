"""The line before one thread."""

import asyncio
import threading
import weakref

import pytest

from longhelix.serve.work_queue import WorkQueue

pytestmark = pytest.mark.unit


class Given:
    """What a request brings."""


def test_who_leaves_the_line_leaves_nothing_in_it():
    held, running = threading.Event(), threading.Event()

    def hold() -> None:
        running.set()
        held.wait(20)

    async def come_and_go():
        line = WorkQueue("things", 2)
        first = asyncio.create_task(line.run(hold))
        await asyncio.to_thread(running.wait, 20)
        given = []
        for _ in range(50):
            brought = Given()
            waiting = asyncio.create_task(line.run(id, brought))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            given.append(weakref.ref(brought))
            del brought, waiting
        kept = [one for one in given if one() is not None]
        held.set()
        await first
        return kept, await line.run(len, "after")

    assert asyncio.run(asyncio.wait_for(come_and_go(), 20)) == ([], 5)
