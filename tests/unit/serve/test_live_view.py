"""What watchers are told: as little as they take, never more than one event of it, and nothing when nobody watches."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from longhelix import Layout
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.result import Delta
from longhelix.errors import EngineError
from longhelix.serve import live
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError
from longhelix.spec.layout import HeadShape
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit


def ran(id):
    return ObservedStep(id, 0, 1, (), 1, 0.01, 0.02, None, 0)


class Driver:
    """An engine that is looked at whenever somebody asks, and has something new each time."""

    def __init__(self):
        self.listeners, self.failure, self.restarting, self.is_idle, self.looks = [], "", "", False, 0
        self.error = None
        self.changes = True

    async def observe(self):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.looks += 1
        return Observation((), self.looks if self.changes else 0, 16, ())

    def step(self, id, *tokens, result=None):
        for hear in self.listeners:
            hear([Delta(request_id, "", result, token_id=1) for request_id in tokens], [ran(id)])


@pytest.fixture
def view(monkeypatch):
    monkeypatch.setattr(live, "_POLL_S", 0.001)
    return live.EngineView(SimpleNamespace(driver=Driver(), is_draining=False))


async def states(view, watcher, count):
    """The next few."""
    found = view.states(watcher)
    return [await anext(found) for _ in range(count)]


def test_nobody_looks_at_an_engine_that_nobody_watches(view):
    driver = view._driver

    async def watch():
        first, second = view.join(), view.join()
        assert len(driver.listeners) == 1
        await states(view, first, 2)
        view.leave(first)
        view.leave(first)
        assert len(driver.listeners) == 1
        view.leave(second)
        looks = driver.looks
        await asyncio.sleep(0.02)
        assert (driver.listeners, driver.looks) == ([], looks)
        again = view.join()
        assert len(driver.listeners) == 1
        await states(view, again, 1)
        view.leave(again)

    asyncio.run(watch())
    assert driver.looks > 2


def test_each_is_told_all_steps_once(view):
    async def watch():
        first, second = view.join(), view.join()
        view._driver.step(0, 7, 8)
        (one,) = await states(view, first, 1)
        view._driver.step(1, 7)
        (two,) = await states(view, first, 1)
        (other,) = await states(view, second, 1)
        assert [step.id for step in one.steps + two.steps] == [step.id for step in other.steps] == [0, 1]
        assert (one.new_tokens, two.new_tokens, other.new_tokens) == (2, 1, 3)
        assert (two.tbt_s.count, two.ttft_s) == (1, None)

    asyncio.run(watch())


def test_who_is_slow_has_the_last_steps_and_no_more(view):
    async def watch():
        watcher = view.join()
        for id in range(1000):
            view._driver.step(id, 7)
        (state,) = await states(view, watcher, 1)
        assert [step.id for step in state.steps] == list(range(744, 1000))
        assert (state.missed_steps, state.new_tokens) == (744, 1000)
        assert state.tbt_s.count == 999

    asyncio.run(watch())


def test_what_does_not_change_is_not_told(view, monkeypatch):
    monkeypatch.setattr(live, "KEEP_ALIVE_S", 0.05)
    view._driver.changes = False

    async def watch():
        first, second = await states(view, view.join(), 2)
        assert first is not None
        assert second is None

    asyncio.run(watch())


def test_so_many_may_watch(view):
    async def watch():
        watchers = [view.join() for _ in range(live.MOST_WATCHERS)]
        with pytest.raises(OverloadedError, match="16 pages are watching"):
            view.join()
        view.leave(watchers[3])
        view.join()

    asyncio.run(watch())


def test_an_engine_that_fails_ends_all_and_a_new_one_is_watched(view):
    driver = view._driver

    async def watch():
        watchers = [view.join(), view.join()]
        await states(view, watchers[0], 1)
        driver.error = EngineError("rank 1 has gone")
        for watcher in watchers:
            with pytest.raises(EngineError, match="rank 1"):
                await states(view, watcher, 3)
        assert driver.listeners == []
        driver.failure = "rank 1 has gone"
        with pytest.raises(EngineError, match="rank 1"):
            view.join()
        driver.failure, driver.restarting = "", "rank 1 has gone"
        with pytest.raises(RestartingError, match="has failed and is restarting"):
            view.join()
        driver.restarting, driver.error = "", None
        await states(view, view.join(), 1)

    asyncio.run(watch())


def test_a_server_that_ends_tells_watchers_once_requests_have_ended(view):
    async def watch():
        watcher = view.join()
        view._serving.is_draining = True
        (state,) = await states(view, watcher, 1)
        assert state.is_draining
        with pytest.raises(ShuttingDownError):
            view.join()
        view._driver.is_idle = True
        with pytest.raises(ShuttingDownError):
            await states(view, watcher, 3)

    asyncio.run(watch())


def test_percentiles_are_of_the_last_minutes():
    times = live.RecentTimes()
    assert times.percentiles(0) is None
    for at in range(200):
        times.add(float(at), at / 10)
    found = times.percentiles(200.0)
    assert (found.count, found.p50, found.p95) == (120, 14.0, 19.3)
    assert times.percentiles(1000.0) is None


def config_of(layout):
    return SimpleNamespace(
        layout=layout,
        scheduler=scheduler_config(2, 9, 64, placement="auto", policy="lars"),
        spec=SimpleNamespace(num_layers=7),
        heads=HeadShape(6, 3),
        formats=SimpleNamespace(kv_dtype="int8"),
        weight_formats="int8",
    )


def test_its_events_are_documented():
    app, llm = FastAPI(), SimpleNamespace(config=config_of(Layout(kvp=2)))
    app.include_router(live.routes(SimpleNamespace(model="small", llm=llm, driver=Driver())))
    document = app.openapi()
    answers = document["paths"]["/live"]["get"]["responses"]
    event = answers["200"]["content"]["text/event-stream"]["itemSchema"]
    assert event["properties"]["data"] == {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": "#/components/schemas/LiveEvent"},
    }
    assert list(answers["429"]["content"]) == ["application/json"]
    names = {each["$ref"].split("/")[-1] for each in document["components"]["schemas"]["LiveEvent"]["anyOf"]}
    assert names == {"LiveServer", "LiveState", "ErrorAnswer"} <= document["components"]["schemas"].keys()
    assert {"observation", "steps", "tbt_s"} <= document["components"]["schemas"]["LiveState"]["properties"].keys()


@pytest.mark.parametrize("layout", [Layout(kvp=3, tpa=2, tpf=2, ep=3), Layout(kvp=2, tpa=2, pp=2, stage_layers=(5, 2))])
def test_every_rank_has_the_layouts_names(layout):
    server = json.loads(live.server_description("small", config_of(layout)).model_dump_json())
    assert [rank["rank"] for rank in server["ranks"]] == list(range(layout.world_size))
    for rank in server["ranks"]:
        assert rank["rank"] == (rank["stage"] * layout.kvp + rank["kvp"]) * layout.tpa + rank["tpa"]
        assert rank["rank"] % layout.num_ranks == rank["ep"] * layout.tpf + rank["tpf"]
    assert {tuple(rank["kv_heads"]) for rank in server["ranks"]} == {(0, 2), (2, 3)}
    by_stage = {rank["stage"]: tuple(rank["layers"]) for rank in server["ranks"]}
    assert list(by_stage.values()) == ([(0, 7)] if layout.pp == 1 else [(0, 5), (5, 7)])
