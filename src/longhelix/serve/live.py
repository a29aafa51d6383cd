"""/live: a stream of the engine's state for monitoring pages."""

import asyncio
import importlib.metadata
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import RootModel

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.result import Delta
from longhelix.errors import EngineError
from longhelix.serve.answer_format import one_line
from longhelix.serve.answers import Answer
from longhelix.serve.driver import Driver
from longhelix.serve.errors import ErrorAnswer, event_stream, response_for, statuses
from longhelix.serve.reading import BodyRoute
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError
from longhelix.serve.serving import Serving
from longhelix.serve.streams import KEEP_ALIVE_S, EventStream

MOST_WATCHERS = 16
_POLL_S = 0.25  # interval between observations of the engine, which all watchers share
_MOST_STEPS = 256  # maximum number of steps in one event
_WINDOW_S, _MOST_TIMES = 120.0, 4096  # percentiles cover this period, and at most this many times


class LiveRank(Answer):
    """Position of a rank in the layout, and its part of the model."""

    rank: int
    stage: int
    kvp: int
    tpa: int
    tpf: int
    ep: int
    layers: tuple[int, int]
    """First layer of this rank, and the layer after its last layer."""
    kv_heads: tuple[int, int]
    """First KV head of this rank, and the KV head after its last KV head."""


class LiveServer(Answer):
    """Data of the first event, which is named `server`. These facts about the server do not change."""

    model: str
    version: str
    max_model_len: int
    block_tokens: int
    kv_blocks: int
    """Number of blocks in the KV pool of each KVP rank."""
    layout: dict[str, int]
    ranks: list[LiveRank]
    placement: str
    policy: str
    kv_dtype: str
    weight_dtype: str


class LiveTimes(Answer):
    """Percentiles of `count` durations in seconds."""

    count: int
    p50: float
    p95: float


class LiveState(Answer):
    """Data of an event named `state`.

    Percentiles cover the last two minutes, except for periods in which no watcher was connected.
    """

    is_draining: bool
    observation: Observation
    steps: list[ObservedStep]
    """Steps since the last event."""
    missed_steps: int
    """Number of steps since the last event that are not in `steps`, because there were too many steps."""
    new_tokens: int
    """Number of new tokens since the last event."""
    ttft_s: LiveTimes | None
    """Percentiles of the time to first token of requests that ended; null if no request ended."""
    tbt_s: LiveTimes | None
    """Percentiles of the time between two tokens of a request; null if there were no such times."""


class LiveEvent(RootModel[LiveServer | LiveState | ErrorAnswer]):
    """Data of an event.

    A stream has one `server` event, followed by `state` events. If the stream fails, its last event is `error`.
    """


@dataclass(eq=False)
class Watcher:
    """State that has not been sent to one client: everything since the client's last event."""

    news: asyncio.Event = field(default_factory=asyncio.Event)  # set if there is an event to send
    steps: deque[ObservedStep] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    ran_steps: int = 0
    new_tokens: int = 0
    error: Exception | None = None  # why the stream ends

    def take(self) -> tuple[list[ObservedStep], int, int]:
        """Return the steps, the number of dropped steps and the number of new tokens, and reset all three."""
        taken = list(self.steps), self.ran_steps - len(self.steps), self.new_tokens
        self.steps.clear()
        self.ran_steps = self.new_tokens = 0
        return taken


class RecentTimes:
    """Durations that were recorded in the last two minutes. Only the latest 4096 durations are kept."""

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


class EngineView:
    """Observes the engine for all watchers, while at least one watcher is connected.

    Each watcher keeps at most as many unsent steps as fit in one event.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._driver: Driver = serving.driver
        self._watchers: set[Watcher] = set()
        self._seen: Observation | None = None
        self._ttft, self._tbt = RecentTimes(), RecentTimes()
        self._last_token_s: dict[int, float] = {}  # time of each request's last token, by request id

    def join(self) -> Watcher:
        """Add a watcher.

        Raises:
            OverloadedError: there are too many watchers.
            RestartingError: the engine is restarting.
            EngineError: the engine has failed.
            ShuttingDownError: the server is shutting down.
        """
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
            self._driver.listeners.append(self._on_step)
            self._polling = asyncio.create_task(self._poll())
        elif self._seen is not None:
            watcher.news.set()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher. May be called more than once."""
        if watcher in self._watchers:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._polling.cancel()
                self._end()

    async def states(self, watcher: Watcher) -> AsyncIterator[LiveState | None]:
        """Yield each new state, and None after `KEEP_ALIVE_S` without a change.

        Raises the error that ends the stream, such as EngineError or ShuttingDownError.
        """
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
        assert self._seen is not None  # `news` is set only after an observation
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

    async def _poll(self) -> None:
        """Observe the engine repeatedly. Each observation waits for the previous one, because steps may be long."""
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
                await asyncio.sleep(_POLL_S)
        except Exception as error:
            for watcher in self._watchers:
                watcher.error = error
                watcher.news.set()
            self._watchers.clear()
            self._end()

    def _forget(self, now_s: float) -> None:
        """Forget requests without a recent token, because they may have been aborted."""
        self._last_token_s = {key: last_s for key, last_s in self._last_token_s.items() if last_s > now_s - _WINDOW_S}

    def _end(self) -> None:
        self._driver.listeners.remove(self._on_step)
        self._seen = None
        self._ttft, self._tbt = RecentTimes(), RecentTimes()
        self._last_token_s.clear()

    def _on_step(self, deltas: Sequence[Delta], ran: Sequence[ObservedStep]) -> None:
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


async def _lines(view: EngineView, watcher: Watcher, server: LiveServer) -> AsyncIterator[str]:
    yield _event("server", server.model_dump_json())
    try:
        async for state in view.states(watcher):
            yield ": nothing has changed\n\n" if state is None else _event("state", state.model_dump_json())
    except Exception as error:
        yield _event("error", bytes(response_for(error).body).decode())


def routes(serving: Serving) -> APIRouter:
    router, view = APIRouter(route_class=BodyRoute), EngineView(serving)
    server = server_description(serving.model, serving.llm.config)
    data = {"contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/LiveEvent"}}
    events = {"description": "Server-sent events", "content": event_stream(data)}

    @router.get(
        "/live",
        response_class=StreamingResponse,
        response_model=LiveEvent,
        responses=statuses(429, 503) | {200: events},
    )
    async def live() -> StreamingResponse:
        """Stream the engine's state as it changes, at most four times a second."""
        watcher, resources = view.join(), AsyncExitStack()
        resources.callback(view.leave, watcher)
        return EventStream(resources, _lines(view, watcher, server))

    return router


def server_description(model: str, config: EngineConfig) -> LiveServer:
    """Return the facts about the server that do not change."""
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
        placement=scheduler.placement.name,
        policy=scheduler.service.policy,
        kv_dtype=config.formats.kv_dtype,
        weight_dtype=config.weight_formats,
    )


def _ends(of: range) -> tuple[int, int]:
    return of.start, of.stop


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {one_line(data)}\n\n"
