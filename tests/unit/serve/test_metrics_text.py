"""What metrics say of requests and steps that are given, beside an engine that does not answer, or has failed."""

import asyncio
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longhelix.engine.observation import Observation, ObservedStep, RanChunk, RankBlocks, RunningRequest
from longhelix.engine.result import Delta, Result
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.config import CacheConfig
from longhelix.serve import metrics as metrics_module
from longhelix.serve.metrics import Metrics
from longhelix.serve.request_progress import RequestProgress
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

FLEETS = Path(__file__).parents[3] / "docs/guides/fleets.md"


class Config:
    layout = Layout(kvp=3, tpa=2)
    scheduler = SimpleNamespace(block_tokens=16, num_blocks=8, cache=CacheConfig())


def running(id):
    return RunningRequest(id, "", 8, 8, 1, 0, 0, "striped", (1, 1, 0))


SEEN = Observation(
    (running(0), running(1)), 1, 16, (RankBlocks(8, 6, 1, 0), RankBlocks(8, 3, 0, 2), RankBlocks(8, 0, 0, 0))
)
STEP = ObservedStep(7, 0, 3, (RanChunk(0, 512), RanChunk(1, 5)), 1, 0.5, 1.0, 0.25, 1000)


class Idle:
    """What metrics ask a driver for. answer: what the engine says when it is looked at, None while it does not."""

    def __init__(self, answer=SEEN):
        self.listeners, self.still_s = [], 2.5
        self.failure, self.restarting, self.restarts = "", "", 3
        self.last_step_s = time.monotonic() - 30
        self.running, self.waiting, self.answer, self.looks = 1, [None, None], answer, 0
        self.request_ids = {0, 1, 2}

    async def observe(self):
        self.looks += 1
        while self.answer is None:
            await asyncio.sleep(0.01)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def read(text):
    """Samples by name and labels, in the order of their names, without the model's."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = [label for name, label in sorted(sample.labels.items()) if name != "model_name"]
            if sample.name.startswith("longhelix:"):
                assert sample.labels["model_name"] == "small"
            found[sample.name.removeprefix("longhelix:"), *labels] = sample.value
    return found


def scraped(driver, *, doing=lambda metrics: None, times=1):
    async def scrape():
        metrics = Metrics(driver, Config, "small")
        doing(metrics)
        for _ in range(times):
            text = await metrics.text()
        return text

    return read(asyncio.run(scrape()))


def test_blocks_and_requests_are_those_that_were_seen():
    found = scraped(Idle())
    assert [found["kv_blocks", str(rank), "held"] for rank in range(3)] == [6, 3, 0]
    for rank in map(str, range(3)):
        assert sum(found["kv_blocks", rank, state] for state in ("held", "cached", "promised", "free")) == 8
    assert found["kv_blocks", "1", "free"] == 3
    assert found[("kv_blocks_imbalance",)] == 6 / 3
    assert found[("kv_cache_usage_perc",)] == 9 / 24
    assert (found[("num_requests_running",)], found[("num_requests_waiting",)]) == (2, 1)
    assert found[("kvp_degree",)] == 3
    assert found["layout_info", "1", "3", "1", "2", "6"] == 1  # ep, kvp, pp, tpa, tpf
    assert found["cache_config_info", "16", "24"] == 1  # tokens per block, blocks of all ranks
    assert found[("watchdog_still_seconds",)] == 2.5
    assert 30 <= found[("seconds_since_last_step",)] < 60


def test_a_context_that_is_saved_is_no_request():
    driver = Idle(replace(SEEN, running=(running(0), running(7))))
    driver.running, driver.waiting, driver.request_ids = 0, [None, None], {0, 1}
    found = scraped(driver)
    assert (found[("num_requests_running",)], found[("num_requests_waiting",)]) == (1, 1)


def test_a_step_is_counted_beside_its_prediction():
    driver = Idle()

    def doing(metrics):
        (hear,) = driver.listeners
        hear([], [STEP, replace(STEP, predicted_s=None, exposed_s=None, chunks=())])

    found = scraped(driver, doing=doing)
    assert found[("steps_total",)] == 2
    assert found[("computed_prompt_tokens_total",)] == found[("chunk_tokens_sum",)] == 517
    assert found[("chunk_tokens_count",)] == 2
    assert found["chunk_tokens_bucket", "512.0"] - found["chunk_tokens_bucket", "256.0"] == 1
    assert found[("exposed_communication_seconds_total",)] == 0.25
    assert (found[("step_measured_seconds_total",)], found[("step_predicted_seconds_total",)]) == (1.0, 0.5)
    assert (found[("step_time_ratio_sum",)], found[("step_time_ratio_count",)]) == (2.0, 1)
    assert found[("step_seconds_sum",)] == 2.0
    assert found[("iteration_tokens_total_sum",)] == 520 + 3
    assert found[("exchanged_bytes_total",)] == 2000


def test_requests_are_counted_by_how_they_end(result):
    def doing(metrics):
        ended, left, failed = (RequestProgress(tokens, 16, time.monotonic()) for tokens in (5, 7, 11))
        for progress in (ended, left, failed):
            metrics.on_accepted(progress)
        for progress in (ended, left):
            progress.on_step(progress.arrival_s)
            for _ in range(3):
                metrics.on_delta(progress, Delta(0, "x", None, 42))
        metrics.on_delta(ended, Delta(0, "", result(prompt_tokens=5, cached_tokens=2, preemptions=1)))
        metrics.on_ended(left, "abort")
        metrics.on_ended(failed, "error")

    found = scraped(Idle(), doing=doing)
    reasons = {reason: found["request_success_total", reason] for reason in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert found[("prompt_tokens_total",)] == found[("request_prompt_tokens_sum",)] == 5 + 7
    assert found[("generation_tokens_total",)] == found[("request_generation_tokens_sum",)] == 6
    assert found[("time_to_first_token_seconds_count",)] == 2
    assert found[("inter_token_latency_seconds_count",)] == found[("time_per_output_token_seconds_count",)] == 4
    assert found[("e2e_request_latency_seconds_count",)] == 3
    assert found[("request_queue_time_seconds_count",)] == found[("request_decode_time_seconds_count",)] == 2
    assert (found[("prefix_cache_queries_total",)], found[("prefix_cache_hits_total",)]) == (5, 2)
    assert found[("num_preemptions_total",)] == 1
    assert found["request_kvp_ranks_bucket", "2.0"] - found["request_kvp_ranks_bucket", "1.0"] == 1
    assert found["request_params_max_tokens_bucket", "20.0"] == 3
    assert found["request_params_max_tokens_bucket", "10.0"] == 0


def test_a_step_that_takes_long_holds_no_scrape_up(monkeypatch):
    """The last numbers are given, and one look at the engine is under way, however many scrape."""
    monkeypatch.setattr(metrics_module, "_LOOK_S", 0.05)
    driver = Idle()

    async def scrape():
        metrics = Metrics(driver, Config, "small")
        first = read(await metrics.text())
        driver.answer = None
        driver.running, driver.waiting, driver.request_ids = 0, [None], {1}
        await asyncio.sleep(0.1)
        later = [read(text) for text in await asyncio.gather(*(metrics.text() for _ in range(8)))]
        later.append(read(await metrics.text()))
        driver.answer = replace(SEEN, running=(), ranks=(RankBlocks(8, 0, 0, 0),) * 3)
        await asyncio.sleep(0.1)
        return first, later, read(await metrics.text())

    first, later, last = asyncio.run(scrape())
    assert driver.looks == 3
    for each in later:
        assert each["kv_blocks", "0", "held"] == first["kv_blocks", "0", "held"] == 6
        assert each[("observation_age_seconds",)] >= 0.1
        # Requests are counted here, whatever was seen: one is left, and it runs.
        assert (each[("num_requests_running",)], each[("num_requests_waiting",)]) == (1, 0)
    assert last["kv_blocks", "0", "held"] == 0
    assert last[("kv_blocks_imbalance",)] == 1


def test_an_engine_that_has_failed_holds_nothing():
    driver = Idle(EngineError("rank 1 went"))
    driver.failure, driver.running, driver.waiting = "rank 1 went", 0, []
    found = scraped(driver, times=2)
    assert found[("engine_up",)] == found["kv_blocks", "0", "held"] == found[("num_requests_running",)] == 0


def test_refusals_are_series_of_ours_alone():
    def doing(metrics):
        for status, code in ((429, "overloaded"), (400, "invalid_argument"), (429, "overloaded")):
            metrics.on_refused(status, code)

    found = scraped(Idle(), doing=doing)
    assert {key[1:]: value for key, value in found.items() if key[0] == "request_refusals_total"} == {
        ("overloaded", "429"): 2,
        ("invalid_argument", "400"): 1,
    }


def test_buckets_reach_minutes_and_millions_of_tokens():
    found = scraped(Idle())

    def bounds(name):
        return [float(key[1]) for key in found if key[0] == f"{name}_bucket"]

    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert sum(60 <= bound < float("inf") for bound in bounds(name)) >= 4
    assert sum(1e6 <= bound < float("inf") for bound in bounds("request_prompt_tokens")) >= 3


def test_what_is_counted_together_is_all_counted():
    """As many steps as make several lots, a part of one, and tokens that make one before the steps do."""
    for steps, tokens in ((3, 1), (64, 1), (200, 1), (5, 40), (7, 1000)):
        driver = Idle()

        def doing(metrics, driver=driver, steps=steps, tokens=tokens):
            (hear,) = driver.listeners
            requests = [RequestProgress(8, 999, time.monotonic()) for _ in range(tokens)]
            for number in range(steps):
                hear([], [replace(STEP, taken_s=0.25 * number)])
                for progress in requests:
                    metrics.on_delta(progress, Delta(0, "a", None, 5))

        found = scraped(driver, doing=doing)
        assert found[("steps_total",)] == found[("step_seconds_count",)] == steps
        assert found[("step_seconds_sum",)] == 0.25 * steps * (steps - 1) / 2
        assert found[("generation_tokens_total",)] == steps * tokens
        for name in ("inter_token_latency_seconds_count", "time_per_output_token_seconds_count"):
            assert found[(name,)] == (steps - 1) * tokens
        assert found[("time_to_first_token_seconds_count",)] == tokens


@pytest.mark.parametrize("prefix", ["", "1x", "a:b", "a b", "a\n", "ä", "x" * 65])
def test_a_prefix_is_a_name(prefix):
    with pytest.raises(UserError, match="metrics_prefix is"):
        Metrics(Idle(), Config, "small", prefix)


@pytest.fixture
def result():
    """A function that makes one, of the fields that are counted."""
    left_out = dict.fromkeys(each.name for each in fields(Result))
    some = {"finish_reason": "stop", "kv_tokens_per_rank": [4, 4, 0]}
    return lambda **given: Result(**left_out | some | given)


def test_routers_find_what_they_read_under_vllms_names():
    """The names that the table of the guide lists."""

    async def scrape():
        return (await Metrics(Idle(), Config, "small", "vllm").text()).decode()

    table = FLEETS.read_text().split("## Metrics that routers read")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `vllm:(\w+)`(?:, label `(\w+)`)? \| `longhelix:(\w+)`", table, re.MULTILINE)
    assert len(rows) == 5
    text = asyncio.run(scrape())
    for name, label, own in rows:
        assert name == own
        assert re.search(rf"^# TYPE vllm:{name} gauge$", text, re.MULTILINE)
        assert re.search(rf'^vllm:{name}\{{.*{label}="', text, re.MULTILINE)
