"""What a server of two ranks counts and writes, beside what was asked of it."""

import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_process import serving

pytestmark = pytest.mark.dist

KEY = "a-key-that-nobody-sees"
SECRET = "a prompt\nthat nobody sees"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    flags = ["--kvp", "2", "--kv-cache-tokens", "8192", "--max-model-len", "2048", "--placement", "striped"]
    with serving(*flags, "--api-key-file", str(keys), "--max-waiting-requests", "4") as server:
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def counted(client):
    """Samples by name and labels in the order of their names, without the model's."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = [label for name, label in sorted(sample.labels.items()) if name != "model_name"]
            found[sample.name.removeprefix("longhelix:"), *labels] = sample.value
    return found


class Counts:
    """What has been counted since this was made."""

    def __init__(self, client):
        self._client, self._before = client, counted(client)

    def __call__(self, name, *labels):
        return counted(self._client).get((name, *labels), 0) - self._before.get((name, *labels), 0)


def settle(client):
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        found = counted(client)
        busy = [found[(name,)] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        if busy == [0, 0, 0]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{busy} requests run and wait, and blocks are held")


def request_lines(server, answers):
    """The lines of these answers, which come a little after them."""
    ids = [answer.headers["x-request-id"] for answer in answers]
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = {line["id"]: line for line in list(server.lines) if line["event"] == "request"}
        if found.keys() >= set(ids):
            return [found[each] for each in ids]
        time.sleep(0.02)
    raise AssertionError(f"no lines of {ids}: {server.lines}")


def test_counts_are_those_of_the_answers(server, client):
    counts = Counts(client)
    bodies = [
        {"prompt": [7] * 300, "max_tokens": 9, **GREEDY},
        {"prompt": [7] * 300 + [8] * 5, "max_tokens": 4, **GREEDY},  # begins as the one before
        {"prompt": [[9, 10, 11], [12, 13]], "max_tokens": 5, "n": 2, "seed": 1, "ignore_eos": True},
        {"prompt": "The capital of France is", "max_tokens": 30, "temperature": 0, "stop": "Paris"},
    ]
    answers = [client.post("/v1/completions", json=body) for body in bodies]
    usages = [answer.json()["usage"] for answer in answers]
    reasons = [choice["finish_reason"] for answer in answers for choice in answer.json()["choices"]]
    assert {reason: reasons.count(reason) for reason in ("length", "stop")} == {"length": 6, "stop": 1}
    settle(client)
    for reason in ("length", "stop", "abort", "error"):
        assert counts("request_success_total", reason) == reasons.count(reason)
    read = [each["prompt_tokens"] for each in usages]
    read[2] *= 2  # each choice reads the prompt, which usage counts once
    new = sum(each["completion_tokens"] for each in usages)
    cached = counts("prefix_cache_hits_total")
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 288
    assert cached >= usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert counts("prompt_tokens_total") == counts("prefix_cache_queries_total") == sum(read)
    assert counts("request_prompt_tokens_sum") == sum(read)
    assert counts("computed_prompt_tokens_total") == counts("chunk_tokens_sum") == sum(read) - cached
    assert counts("generation_tokens_total") == counts("request_generation_tokens_sum") == new
    assert counts("time_to_first_token_seconds_count") == counts("e2e_request_latency_seconds_count") == 7
    assert counts("inter_token_latency_seconds_count") == new - 7
    assert counts("request_queue_time_seconds_count") == counts("request_decode_time_seconds_count") == 7
    assert counts("request_kvp_ranks_count") == 7
    assert counts("request_kvp_ranks_bucket", "2.0") - counts("request_kvp_ranks_bucket", "1.0") >= 2
    steps = counts("steps_total")
    assert steps >= 9
    assert counts("step_seconds_count") == counts("step_time_ratio_count") == steps
    assert counts("iteration_tokens_total_sum") >= sum(read) - cached + new - 7
    assert counts("step_measured_seconds_total") == pytest.approx(counts("step_seconds_sum"))
    assert counts("step_predicted_seconds_total") > 0
    lines = request_lines(server, answers)
    assert [line["new_tokens"] for line in lines] == [each["completion_tokens"] for each in usages]
    assert [line["prompt_tokens"] for line in lines] == read
    assert [line["finish_reason"] for line in lines] == ["length", "length", "length", "stop"]
    assert all(0 < line["ttft_s"] <= line["duration_s"] for line in lines)


def test_steps_are_those_that_health_tells(client):
    settle(client)
    assert counted(client)[("steps_total",)] == client.get("/health").json()["steps"]


def test_a_client_that_goes_away_leaves_nothing_held(server, client):
    counts = Counts(client)
    body = {"prompt": [31] * 700, "max_tokens": 1000, "stream": True, **GREEDY}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data"))  # and no comment of a slow one
        held = [0, 0]
        while min(held) < 20:  # a step that takes long delays what is seen
            seen = counted(client)
            assert (seen[("num_requests_running",)], seen[("num_requests_waiting",)]) == (1, 0)
            held = [seen["kv_blocks", rank, "held"] for rank in ("0", "1")]
        assert sum(held) / seen[("kv_cache_usage_perc",)] == pytest.approx(8192 / 16)
        assert seen[("kv_blocks_imbalance",)] == pytest.approx(max(held) * 2 / sum(held))
    found = settle(client)
    assert counts("request_success_total", "abort") == 1
    assert counts("prompt_tokens_total") == 700
    assert counts("generation_tokens_total") >= 1
    for rank in ("0", "1"):
        assert found["kv_blocks", rank, "held"] == 0
        states = ("held", "cached", "promised", "free")
        assert sum(found["kv_blocks", rank, state] for state in states) == 8192 / 16 / 2
    (line,) = request_lines(server, [answer])
    assert (line["finish_reason"], line["status"]) == ("abort", 200)
    assert line["new_tokens"] == counts("generation_tokens_total")


@pytest.mark.slow
def test_refusals_are_counted_by_kind(server, client):
    counts = Counts(client)
    wrong = [client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}) for _ in range(3)]
    wrong.append(client.post("/v1/completions", json={"prompt": [1] * 3000}))
    wrong.append(client.get("/nowhere"))
    four = {"prompt": [[token] * 600 for token in range(41, 45)], "max_tokens": 1, "ignore_eos": True}
    asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": four})
    asking.start()
    while client.get("/health").json()["waiting"] < 4:
        time.sleep(0.01)
    wrong.append(client.post("/v1/completions", json={"prompt": "x"}))
    asking.join()
    bare = httpx.get(f"{server.url}/metrics")
    assert [answer.status_code for answer in (*wrong, bare)] == [400, 400, 400, 400, 404, 429, 401]
    assert counts("request_refusals_total", "invalid_argument", "400") == 3
    assert counts("request_refusals_total", "context_length_exceeded", "400") == 1
    assert counts("request_refusals_total", "not_found", "404") == 1
    assert counts("request_refusals_total", "overloaded", "429") == 1
    assert counts("request_refusals_total", "invalid_api_key", "401") == 1
    assert counts("request_success_total", "length") == 4
    lines = request_lines(server, [*wrong, bare])
    assert [line["status"] for line in lines] == [400, 400, 400, 400, 404, 429, 401]
    assert lines[4]["route"] == "other"
    settle(client)


def test_series_do_not_grow_with_clients(client):
    client.get("/health")
    before = len(counted(client))
    for index in range(20):
        body = {
            "prompt": "x",
            "max_tokens": 1,
            "client": f"client {index}",
            "user": f"u{index}",
            "cache_salt": f"s{index}",
        }
        assert client.post("/v1/completions", json=body).status_code == 200
        client.get("/nowhere", params={"at": index})
    assert len(counted(client)) <= before + 1


def test_head_has_no_body(client):
    head = client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == client.get("/metrics").headers["content-type"]


def test_the_server_writes_its_life_and_no_secret(server, client):
    """The last test: it ends the server."""
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": SECRET.replace("\n", " ")})
    assert answer.status_code == 200
    request_lines(server, [answer])
    assert server.end() == 0
    end = server.line("end")
    assert end["steps"] > 0
    events = [line["event"] for line in server.lines if line["event"] != "warning"]  # of cores that ranks share
    assert events[:4] == ["start", "layout", "kv_cache", "ready"]
    assert events[-2:] == ["drain", "end"]
    cache = server.line("kv_cache")
    assert (cache["held_tokens"], cache["max_model_len"], cache["max_concurrency"]) == (8192, 2048, 4)
    assert cache["message"].startswith("KV cache holds 8,192 tokens")
    assert "maximum concurrency at 2,048 tokens: 4" in cache["message"]
    said = repr(server.lines)
    assert KEY not in said
    assert "nobody sees" not in said
    assert "capital of France" not in said
