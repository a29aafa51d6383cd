"""/live: what the engine does, for whoever looks at it while it does."""

import asyncio
import importlib.metadata
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, RootModel

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.result import Delta
from longhelix.errors import EngineError
from longhelix.serve.driver import Driver
from longhelix.serve.errors import Refusal, event_stream, of_error, statuses
from longhelix.serve.form import one_line
from longhelix.serve.reading import BodyRoute
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError
from longhelix.serve.serving import Serving
from longhelix.serve.streams import KEEP_ALIVE_S, EventStream

MOST_WATCHERS = 16
_LOOK_S = 0.25  # between two looks at the engine, all watchers together
_MOST_STEPS = 256  # of one event
_WINDOW_S, _MOST_TIMES = 120.0, 4096  # what percentiles are of


class LiveRank(BaseModel):
    """A rank by all of its names. Ranges are [first, past the last]: what it has of the model's layers and KV heads."""

    rank: int
    stage: int
    kvp: int
    tpa: int
    tpf: int
    ep: int
    layers: tuple[int, int]
    kv_heads: tuple[int, int]


class LiveServer(BaseModel):
    """The first event, named `server`: what stays. kv_blocks: of each KVP rank's pool."""

    model: str
    version: str
    max_model_len: int
    block_tokens: int
    kv_blocks: int
    layout: dict[str, int]
    ranks: list[LiveRank]
    placement: str
    policy: str
    kv_dtype: str
    weight_dtype: str


class LiveTimes(BaseModel):
    """Percentiles of `count` times in seconds."""

    count: int
    p50: float
    p95: float


class LiveState(BaseModel):
    """Events named `state`. steps, new_tokens: since the event before; missed_steps: those
    of them that are left out, because so many had run. ttft_s, tbt_s: of the last two minutes, as far as somebody
    watched: of requests that ended, and between the tokens of a request; null where there were none."""

    is_draining: bool
    observation: Observation
    steps: list[ObservedStep]
    missed_steps: int
    new_tokens: int
    ttft_s: LiveTimes | None
    tbt_s: LiveTimes | None


class LiveEvent(RootModel[LiveServer | LiveState | Refusal]):
    """The data of an event: `server`, then `state`, again and again, and at the end, perhaps, `error`."""


@dataclass(eq=False)
class Watcher:
    """What has happened since somebody was told. news: is set where there is something to tell. error: why there will
    be no more."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    steps: deque[ObservedStep] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    ran_steps: int = 0
    new_tokens: int = 0
    error: Exception | None = None

    def take(self) -> tuple[list[ObservedStep], int, int]:
        """Steps, how many more there were, new tokens; then it has been told."""
        taken = list(self.steps), self.ran_steps - len(self.steps), self.new_tokens
        self.steps.clear()
        self.ran_steps = self.new_tokens = 0
        return taken


class Times:
    """Times of the last minutes, the last few thousand of them."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=_MOST_TIMES)

    def add(self, now_s: float, took_s: float) -> None:
        self._times.append((now_s, took_s))

    def percentiles(self, now_s: float) -> LiveTimes | None:
        while self._times and self._times[0][0] < now_s - _WINDOW_S:
            self._times.popleft()
        if not self._times:
            return None
        ordered = sorted(took_s for _, took_s in self._times)
        p50, p95 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.95))
        return LiveTimes(count=len(ordered), p50=p50, p95=p95)


class View:
    """The engine as all watchers see it. Looks at it as long as there is one, and listens to it as long; what a
    watcher has not been told grows no further than one event."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._driver: Driver = serving.driver
        self._watchers: set[Watcher] = set()
        self._seen: Observation | None = None
        self._ttft, self._tbt = Times(), Times()
        self._last_token_s: dict[int, float] = {}  # by request

    def join(self) -> Watcher:
        """Raises OverloadedError where so many watch, RestartingError while the engine starts again, EngineError once
        it has failed, ShuttingDownError."""
        if self._serving.is_draining:
            raise ShuttingDownError
        if self._driver.failure:
            raise EngineError(self._driver.failure)
        if self._driver.restarting:
            raise RestartingError
        if len(self._watchers) >= MOST_WATCHERS:
            raise OverloadedError(f"{MOST_WATCHERS} pages are watching: close one, or try again later")
        watcher = Watcher()
        if not self._watchers:
            self._driver.listeners.append(self._hear)
            self._looking = asyncio.create_task(self._look())
        elif self._seen is not None:
            watcher.news.set()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """May be called more than once."""
        if watcher in self._watchers:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._looking.cancel()
                self._end()

    async def states(self, watcher: Watcher) -> AsyncIterator[LiveState | None]:
        """As they come; None where nothing has come for a while. Raises what ends the engine or the server."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await watcher.news.wait()
            except TimeoutError:
                yield None
                continue
            watcher.news.clear()
            if watcher.error is not None:
                raise watcher.error
            yield self._state(watcher)

    def _state(self, watcher: Watcher) -> LiveState:
        assert self._seen is not None  # or there were no news
        now_s = time.monotonic()
        steps, missed_steps, new_tokens = watcher.take()
        return LiveState(
            is_draining=self._serving.is_draining,
            observation=self._seen,
            steps=steps,
            missed_steps=missed_steps,
            new_tokens=new_tokens,
            ttft_s=self._ttft.percentiles(now_s),
            tbt_s=self._tbt.percentiles(now_s),
        )

    async def _look(self) -> None:
        """One after the other, so that an engine whose steps are long is not asked again meanwhile."""
        try:
            while True:
                if self._serving.is_draining and self._driver.is_idle:
                    raise ShuttingDownError
                seen = await self._driver.observe()
                changed, self._seen = seen != self._seen, seen
                for watcher in self._watchers:
                    if changed or watcher.ran_steps:
                        watcher.news.set()
                self._forget(time.monotonic())
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            for watcher in self._watchers:
                watcher.error = error
                watcher.news.set()
            self._watchers.clear()
            self._end()

    def _forget(self, now_s: float) -> None:
        """Requests that have had no token for long: they may have been aborted."""
        self._last_token_s = {key: last_s for key, last_s in self._last_token_s.items() if last_s > now_s - _WINDOW_S}

    def _end(self) -> None:
        self._driver.listeners.remove(self._hear)
        self._seen = None
        self._ttft, self._tbt = Times(), Times()
        self._last_token_s.clear()

    def _hear(self, deltas: Sequence[Delta], ran: Sequence[ObservedStep]) -> None:
        now_s, new_tokens = time.monotonic(), 0
        for delta in deltas:
            if delta.token_id is not None:
                new_tokens += 1
                last_s = self._last_token_s.get(delta.request_id)
                if last_s is not None:
                    self._tbt.add(now_s, now_s - last_s)
                self._last_token_s[delta.request_id] = now_s
            if delta.result is not None:
                self._last_token_s.pop(delta.request_id, None)
                if delta.result.ttft_s is not None:
                    self._ttft.add(now_s, delta.result.ttft_s)
        for watcher in self._watchers:
            watcher.steps.extend(ran)
            watcher.ran_steps += len(ran)
            watcher.new_tokens += new_tokens


async def _lines(view: View, watcher: Watcher, server: LiveServer) -> AsyncIterator[str]:
    yield _event("server", server.model_dump_json())
    try:
        async for state in view.states(watcher):
            yield ": nothing has changed\n\n" if state is None else _event("state", state.model_dump_json())
    except Exception as error:
        yield _event("error", bytes(of_error(error).body).decode())


def routes(serving: Serving) -> APIRouter:
    router, view = APIRouter(route_class=BodyRoute), View(serving)
    server = what_stays(serving.model, serving.llm.config)
    data = {"contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/LiveEvent"}}
    events = {"description": "Server-sent events", "content": event_stream(data)}

    @router.get(
        "/live",
        response_class=StreamingResponse,
        response_model=LiveEvent,
        responses=statuses(429, 503) | {200: events},
    )
    async def live() -> StreamingResponse:
        """What the engine does, at most four times a second, and only where it changes."""
        watcher, held = view.join(), AsyncExitStack()
        held.callback(view.leave, watcher)
        return EventStream(held, _lines(view, watcher, server))

    return router


def what_stays(model: str, config: EngineConfig) -> LiveServer:
    layout, scheduler = config.layout, config.scheduler
    degrees = ("kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")
    return LiveServer(
        model=model,
        version=importlib.metadata.version("longhelix"),
        max_model_len=scheduler.max_model_len,
        block_tokens=scheduler.block_tokens,
        kv_blocks=scheduler.num_blocks,
        layout={degree: getattr(layout, degree) for degree in degrees},
        ranks=[
            LiveRank(
                rank=rank,
                stage=layout.stage(rank),
                kvp=layout.kvp_rank(rank),
                tpa=layout.tpa_rank(rank),
                tpf=layout.tpf_rank(rank),
                ep=layout.ep_rank(rank),
                layers=_ends(layout.layers(config.spec.num_layers, rank)),
                kv_heads=_ends(layout.kv_heads(config.heads, rank)),
            )
            for rank in range(layout.world_size)
        ],
        placement=scheduler.placement,
        policy=scheduler.policy,
        kv_dtype=config.kv_dtype,
        weight_dtype=config.weight_dtype,
    )


def _ends(of: range) -> tuple[int, int]:
    return of.start, of.stop


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {one_line(data)}\n\n"
