"""Prometheus metrics of the server. A metric that vLLM also has uses vLLM's name.

Label values never come from clients, so clients cannot create series.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.observation import Observation, ObservedStep, RankBlocks
from longhelix.engine.result import Delta
from longhelix.errors import EngineError, UserError
from longhelix.serve.driver import Driver
from longhelix.serve.refusals import RestartingError, ShuttingDownError
from longhelix.serve.request_progress import RequestProgress

PREFIX = "longhelix"
REASONS = ("stop", "length", "abort", "error")
_BLOCK_STATES = ("held", "cached", "promised", "free")
_LOOK_S = 0.5  # maximum time that a scrape waits for the running step
_BATCH = 64  # number of steps or tokens that are counted together

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 320.0, 640.0, 1280.0, 2560.0, 5120.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 3840.0, 7680.0),
)
_STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKENS = tuple(float(digit * 10**power) for power, digit in product(range(8), (1, 2, 5)))
_DOUBLED = tuple(float(2**power) for power in range(17))
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

# These series would only repeat the server's start time for each counter and histogram.
disable_created_metrics()


class Metrics:
    """Metrics of one server, in a separate registry. All methods must be called on the event loop.

    Args:
        driver: the engine.
        config: configuration of the engine.
        model: value of the label `model_name`.
        prefix: prefix of all metric names.

    Raises:
        UserError: Prometheus does not allow the prefix.
    """

    def __init__(self, driver: Driver, config: EngineConfig, model: str, prefix: str = PREFIX) -> None:
        if re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]{0,63}", prefix) is None:
            raise UserError(f"metrics_prefix is {prefix[:80]!r}: set it to a name of letters, digits and _")
        self._driver, self._prefix, self._model = driver, prefix, model
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._seen: Observation | None = None
        self._seen_s = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._ran: list[ObservedStep] = []  # steps that have not been counted yet
        self._between_s: list[float] = []  # times between tokens that have not been counted yet

        self._running = self._gauge("num_requests_running", "Requests that are running.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to run.")
        self._usage = self._gauge("kv_cache_usage_perc", "Fraction of KV blocks in use, from 0 to 1.")
        windows = config.scheduler.cache.windows
        self._all_limited = bool(windows) and all(config.spec.groups)
        num_blocks = min(one.num_blocks for one in windows) if self._all_limited else config.scheduler.num_blocks
        # vLLM's names. Routers read the size of the KV cache from these labels.
        self._info(
            "cache_config_info",
            "Size of the KV cache: tokens per block, and number of blocks on all KVP ranks, of any device.",
            {
                "block_size": config.scheduler.block_tokens,
                "num_gpu_blocks": config.layout.kvp * num_blocks,
            },
        )
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens of finished requests.")
        self._hits = self._counter(
            "prefix_cache_hits", "Prompt tokens of finished requests that were read from the prefix cache."
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions of finished requests.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have their first token.")
        self._new_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._reasoning_tokens = self._counter("reasoning_tokens", "Reasoning tokens of finished requests.")
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _TOKENS)
        success = Counter(
            f"{prefix}:request_success",
            "Finished requests by finish reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ended = {reason: success.labels(model, reason) for reason in REASONS}
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._request_new = self._histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self._request_most = self._histogram(
            "request_params_max_tokens", "Maximum number of new tokens per request.", _TOKENS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", _FIRST_TOKEN_S
        )
        self._between_tokens = [
            self._histogram(name, "Time between two tokens of a request.", _TOKEN_S)
            for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")  # vLLM's new and old name
        ]
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Time from the arrival of a request to its end.", _REQUEST_S
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Time from the arrival of a request to its first step.", _REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the first step of a request to its first token.", _REQUEST_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Time from the first token of a request to its last.", _REQUEST_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time from the first step of a request to its last token.", _REQUEST_S
        )

        layout = config.layout
        degrees = {name: getattr(layout, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
        self._info("layout_info", "Degrees of the parallel layout.", degrees)
        self._gauge("kvp_degree", "Number of KVP ranks.").set(layout.kvp)
        self._kv_ranks = self._histogram(
            "request_kvp_ranks", "Number of KVP ranks that hold KV of a request when the request ends.", _DOUBLED
        )
        blocks = Gauge(
            f"{prefix}:kv_blocks",
            "KV blocks of a KVP rank by state: held by requests or contexts, cached, reserved, free.",
            ["model_name", "rank", "state"],
            registry=self._registry,
        )
        self._blocks = [
            {state: blocks.labels(model, str(rank), state) for state in _BLOCK_STATES} for rank in range(layout.kvp)
        ]
        self._imbalance = self._gauge(
            "kv_blocks_imbalance",
            "Held KV blocks of the fullest KVP rank divided by the mean over ranks; 1 if no blocks are held.",
        )
        self._steps = self._counter("steps", "Completed steps.")
        self._step_s = self._histogram("step_seconds", "Duration of a step.", _STEP_S)
        self._measured_s = self._counter("step_measured_seconds", "Total duration of the steps that had a prediction.")
        self._predicted_s = self._counter("step_predicted_seconds", "Total predicted duration of steps.")
        self._ratio = self._histogram("step_time_ratio", "Duration of a step divided by its prediction.", _RATIOS)
        self._exposed_s = self._counter("exposed_communication_seconds", "Time that ranks waited for exchanges.")
        self._exchanged = self._counter("exchanged_bytes", "Bytes that ranks sent in exchanges.")
        self._network = self._counter("network_bytes", "Bytes that ranks sent to ranks of other hosts. 0 on GPUs.")
        self._chunks = self._histogram("chunk_tokens", "Prompt tokens of one request in one step.", _DOUBLED)
        self._computed = self._counter(
            "computed_prompt_tokens",
            "Prompt tokens that steps computed: cached tokens do not count, recomputed tokens count again.",
        )
        self._since_step = self._gauge(
            "seconds_since_last_step", "Time since the last completed step, or since the start."
        )
        self._since_seen = self._gauge(
            "observation_age_seconds",
            "Age of the numbers of blocks and running requests. A long step delays their update.",
        )
        self._up = self._gauge(
            "engine_up", "1 while the engine accepts requests, 0 while it restarts or after it has failed."
        )
        self._restarts = self._counter("engine_restarts", "Restarts of the engine after failures.")
        self._still = self._gauge(
            "watchdog_still_seconds",
            "Time without progress on any rank in the running step. The watchdog ends a step that makes no progress.",
        )
        self._refusals = Counter(
            f"{prefix}:request_refusals",
            "Responses with status 400 or above, by status and error code.",
            ["model_name", "status", "code"],
            registry=self._registry,
        )
        driver.listeners.append(self._on_step)

    def on_accepted(self, progress: RequestProgress) -> None:
        """Count a request that the engine has accepted."""
        self._request_most.observe(progress.max_new_tokens)

    def on_delta(self, progress: RequestProgress, delta: Delta) -> None:
        """Count a new token or a result of a request."""
        before_s, now_s = progress.last_token_s, time.monotonic()
        progress.on_delta(delta, now_s)
        if delta.token_id is not None:
            if before_s is None:
                self._count_prompt(progress)
                self._new_tokens.inc()
                self._first_token.observe(now_s - progress.arrival_s)
            else:
                self._between_s.append(now_s - before_s)
        if progress.has_ended:
            self._end(progress)

    def on_ended(self, progress: RequestProgress, reason: str) -> None:
        """Count a request that has ended without a result."""
        progress.end(reason, time.monotonic())
        self._end(progress)

    def on_refused(self, status: int, code: str) -> None:
        """Count a response with an error."""
        self._refusals.labels(self._model, str(status), code).inc()

    def on_restart(self) -> None:
        """Count a restart of the engine."""
        self._restarts.inc()

    async def text(self) -> bytes:
        """Return all metrics in the Prometheus text format.

        Waits at most half a second for the engine. If the running step takes longer, uses the last observation.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._observe())
        await asyncio.wait((self._look,), timeout=_LOOK_S)
        self._count()
        self._set_now(time.monotonic())
        return generate_latest(self._registry)

    async def _observe(self) -> None:
        try:
            self._seen = await self._driver.observe()
        except (EngineError, RestartingError):
            self._seen = None  # a failed engine holds no blocks
        except ShuttingDownError:
            return
        self._seen_s = time.monotonic()

    def _set_now(self, now_s: float) -> None:
        driver, seen = self._driver, self._seen
        # The observation may be out of date, and it includes contexts that are being saved, which are not requests.
        admitted = sum(each.id in driver.request_ids for each in seen.running) if seen is not None else 0
        running = max(driver.running, admitted)
        self._running.set(running)
        self._waiting.set(driver.running + len(driver.waiting) - running)
        ranks = seen.ranks if seen is not None else [RankBlocks(0, 0, 0, 0)] * len(self._blocks)
        for states, rank in zip(self._blocks, ranks, strict=True):
            states["held"].set(rank.held)
            states["cached"].set(rank.cached)
            states["promised"].set(rank.promised)
            states["free"].set(rank.total - rank.held - rank.cached - rank.promised)
        held = [rank.held for rank in ranks]
        self._usage.set(0.0 if seen is None else seen.usage(all_limited=self._all_limited))
        self._imbalance.set(max(held) * len(held) / sum(held) if any(held) else 1.0)
        self._since_step.set(now_s - driver.last_step_s)
        self._since_seen.set(now_s - self._seen_s)
        self._up.set(not (driver.failure or driver.restarting))
        self._still.set(driver.still_s)

    def _on_step(self, deltas: Sequence[Delta], ran: Sequence[ObservedStep]) -> None:
        """Collect steps and count them in batches, because a step evicts these counters from the CPU caches."""
        self._ran += ran
        if len(self._ran) >= _BATCH or len(self._between_s) >= _BATCH:
            self._count()

    def _count(self) -> None:
        """Count the collected steps and times between tokens."""
        self._new_tokens.inc(len(self._between_s))
        for between_s in self._between_s:
            for histogram in self._between_tokens:
                histogram.observe(between_s)
        self._between_s.clear()
        for step in self._ran:
            chunks = [chunk.num_tokens for chunk in step.chunks]
            self._steps.inc()
            self._step_s.observe(step.taken_s)
            self._step_tokens.observe(step.decode_rows + sum(chunks))
            self._computed.inc(sum(chunks))
            self._exchanged.inc(step.exchanged_bytes)
            self._network.inc(step.network_bytes)
            for chunk in chunks:
                self._chunks.observe(chunk)
            if step.exposed_s is not None:
                self._exposed_s.inc(step.exposed_s)
            if step.predicted_s:
                self._predicted_s.inc(step.predicted_s)
                self._measured_s.inc(step.taken_s)
                self._ratio.observe(step.taken_s / step.predicted_s)
        self._ran.clear()

    def _count_prompt(self, progress: RequestProgress) -> None:
        """Count the prompt of a request that has received its first token."""
        self._prompt_tokens.inc(progress.prompt_tokens)
        self._request_prompt.observe(progress.prompt_tokens)

    def _end(self, progress: RequestProgress) -> None:
        assert progress.ended_s is not None
        self._ended[progress.reason].inc()
        if progress.first_token_s is None and progress.reason in ("stop", "length"):
            self._count_prompt(progress)  # without a new token, it only scored its prompt or filled the context
        self._request_new.observe(progress.new_tokens)
        self._whole.observe(progress.ended_s - progress.arrival_s)
        if progress.first_step_s is not None:
            self._queued.observe(progress.first_step_s - progress.arrival_s)
            if progress.first_token_s is not None and progress.last_token_s is not None:
                self._prefill.observe(progress.first_token_s - progress.first_step_s)
                self._decode.observe(progress.last_token_s - progress.first_token_s)
                self._inference.observe(progress.last_token_s - progress.first_step_s)
        result = progress.result
        if result is not None:
            self._queries.inc(result.prompt_tokens)
            self._hits.inc(result.cached_tokens)
            self._reasoning_tokens.inc(result.reasoning_tokens or 0)
            self._preemptions.inc(result.preemptions)
            self._kv_ranks.observe(sum(tokens > 0 for tokens in result.kv_tokens_per_rank))

    def _info(self, name: str, description: str, values: Mapping[str, int]) -> None:
        """Add a gauge that is always 1. Its labels have the values."""
        gauge = Gauge(f"{self._prefix}:{name}", description, ["model_name", *values], registry=self._registry)
        gauge.labels(self._model, *values.values()).set(1)

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"{self._prefix}:{name}", description, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", description, ["model_name"], registry=self._registry).labels(
            self._model
        )

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            f"{self._prefix}:{name}", description, ["model_name"], buckets=buckets, registry=self._registry
        )
        return made.labels(self._model)
