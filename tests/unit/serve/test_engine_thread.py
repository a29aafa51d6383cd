"""What the engine's thread obeys between two steps: in order, for a while, and nothing that was asked for by those who
have gone."""

import asyncio
import threading

import pytest

from longhelix.scheduler.request import ANY_SERVICE, SamplingParams
from longhelix.serve import engine_thread
from longhelix.serve.engine_request import EngineRequest, PendingRequest
from longhelix.serve.engine_thread import EngineThread, Recovery

pytestmark = pytest.mark.unit


class Engine:
    """Has work once it has a request. log: what it is asked to do, steps in a row once. A request with token 0 is taken
    when it `may_go_on`."""

    def __init__(self):
        self.log, self.running = [], set()
        self.holds, self.may_go_on = threading.Event(), threading.Event()

    @property
    def has_work(self):
        return bool(self.running)

    def watch(self):
        pass

    def add(self, prompt, sampling, service, context, arrival_s, reasoning):
        (token,) = prompt
        if token == 0:
            self.holds.set()
            assert self.may_go_on.wait(10)
        self.log.append(f"add {token}")
        self.running.add(token)
        return token

    def abort(self, request_id):
        self.log.append(f"abort {request_id}")
        self.running.discard(request_id)

    def step(self):
        if self.log[-1] != "step":
            self.log.append("step")
        return []

    def ran_steps(self):
        return []

    def close(self):
        pass


class Observer:
    """told: what the thread has said of requests, by their tokens."""

    def __init__(self):
        self.told = []

    def on_accepted(self, pending, request_id):
        self.told.append(("accepted", request_id))

    def on_abandoned(self, pending):
        self.told.append(("left", *pending.request.prompt))

    def on_aborted(self, request_id):
        self.told.append(("gone", request_id))

    def on_step(self, deltas, progress, ran):
        pass


def run(check):
    """What the engine has done and what was told, of a check beside the thread that takes request 0 just now. It is
    given the thread and a function that makes answers."""

    async def whole():
        engine, observer = Engine(), Observer()
        thread = EngineThread(engine, Recovery(), observer)
        thread.start()

        def answer(token):
            return PendingRequest(EngineRequest([token], 1, SamplingParams(), ANY_SERVICE, 0.0), lambda got: None)

        async def told(*last):
            async with asyncio.timeout(10):
                while observer.told[-1:] != [last]:
                    await asyncio.sleep(0.001)

        try:
            thread.add(answer(0))
            await asyncio.to_thread(engine.holds.wait, 10)
            await check(thread, answer, engine.may_go_on.set, told)
        finally:
            engine.may_go_on.set()
            await thread.close()
        return engine.log, observer.told

    return asyncio.run(whole())


def test_what_clients_want_who_have_gone_is_not_begun():
    async def check(thread, answer, go_on, told):
        answers = [answer(token) for token in range(1, 51)]
        for each in answers:
            thread.add(each)
        for each in answers:
            thread.abort(each)
        go_on()
        await told("left", 50)

    log, told = run(check)
    assert set(log) == {"add 0", "step"}
    assert told == [("accepted", 0), *(("left", token) for token in range(1, 51))]


@pytest.mark.parametrize("while_s", [0.0, 60.0])
def test_steps_run_between_what_takes_long(monkeypatch, while_s):
    """What takes no time is obeyed in one go; in both cases in order."""
    monkeypatch.setattr(engine_thread, "_COMMANDS_S", while_s)

    async def check(thread, answer, go_on, told):
        seen = asyncio.get_running_loop().create_future()
        for token in (1, 2):
            thread.add(answer(token))
        thread.call(lambda: thread._llm.log.append("look"), seen)
        thread.add(answer(3))
        go_on()
        await told("accepted", 3)
        assert seen.done()

    log, _ = run(check)
    obeyed = ["add 0", "add 1", "add 2", "look", "add 3"]
    assert [each for each in log if each != "step"] == obeyed
    if while_s:
        assert log[:5] == obeyed
    else:
        assert log[:9:2] == obeyed


def test_who_goes_is_let_go_of_before_others_begin(monkeypatch):
    monkeypatch.setattr(engine_thread, "_COMMANDS_S", 0.0)

    async def check(thread, answer, go_on, told):
        first, *others = (answer(token) for token in (1, 2, 3))
        thread.add(first)
        go_on()
        await told("accepted", 1)
        held = threading.Event()
        thread.call(held.wait, asyncio.get_running_loop().create_future())
        for each in others:
            thread.add(each)
        thread.abort(first)
        held.set()
        await told("accepted", 3)

    log, _ = run(check)
    assert [each for each in log if each != "step"] == ["add 0", "add 1", "abort 1", "add 2", "add 3"]


class Panic(BaseException):
    """As extensions written in Rust raise."""


@pytest.mark.parametrize("ends_with", [ValueError, Panic])
@pytest.mark.parametrize("fails_to_close", [False, True])
def test_whatever_ends_the_thread_is_told(ends_with, fails_to_close):
    """Or clients wait for ever."""
    told = threading.Event()

    class Ended(Engine):
        has_failed = False

        def watch(self):
            raise ends_with("it broke")

        def close(self):
            if fails_to_close and threading.current_thread().name == "engine":
                raise OSError("a disk broke")

    class Ends(Observer):
        def on_failed(self, reason):
            self.told.append(reason)
            told.set()

    async def whole():
        observer = Ends()
        thread = EngineThread(Ended(), Recovery(), observer)
        thread.start()
        assert await asyncio.to_thread(told.wait, 10)
        await thread.close()
        return observer.told

    (reason,) = asyncio.run(whole())
    assert reason.startswith(f"{ends_with.__name__}: it broke")
    assert ("the engine did not close: OSError: a disk broke" in reason) == fails_to_close
