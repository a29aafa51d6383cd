"""HTTP requests from end to end beside an engine that only counts: ids, log lines, what metrics say."""

import asyncio
import contextlib
import json
import time
import tracemalloc
import types
from array import array
from threading import Event, current_thread

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longhelix.engine.observation import Observation, ObservedStep, RanChunk, RankBlocks
from longhelix.engine.result import Delta, Result
from longhelix.errors import EngineError, UserError
from longhelix.serve import json_reader, reading
from longhelix.serve import serving as serving_module
from longhelix.serve.app import build
from longhelix.serve.bodies import Message
from longhelix.serve.driver import Driver, Limits
from longhelix.serve.engine_thread import Recovery
from longhelix.serve.gate import AccessControl
from longhelix.serve.json_reader import DEEPEST, LONG_TEXT
from longhelix.serve.server_log import ServerLog
from longhelix.serve.serving import _TEXT_THREADS, Serving
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.vocabulary import Vocabulary
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

LIMITS, RECOVERY = Limits(8, 1000), Recovery()
HELD = (RankBlocks(8, 0, 0, 0), RankBlocks(8, 0, 0, 0))


class Counting:
    """An engine whose requests get token 5 in each step, until they have as many as they may. failure: is raised by the
    next step."""

    def __init__(self):
        spec = types.SimpleNamespace(vocabulary=Vocabulary(100), vision=None, num_layers=1, groups=(0,))
        scheduler = scheduler_config(2, 9, 64, placement="auto", policy="lars")
        self.config = types.SimpleNamespace(
            layout=Layout(kvp=2),
            scheduler=scheduler,
            spec=spec,
            heads=HeadShape(2, 2),
            formats=types.SimpleNamespace(kv_dtype="int8"),
            weight_formats="int8",
        )
        self.tokenizer = types.SimpleNamespace(encode=list, reasoning_form=lambda parser: None)
        self.contexts_folder, self.is_saving = None, False
        self.still_s, self.failure = 0.0, None
        self._left, self._asked, self._ran, self._next_id, self.arrivals_s = {}, {}, [], 0, []

    @property
    def has_work(self):
        return bool(self._left)

    @property
    def has_failed(self):
        return self.failure is not None

    def watch(self):
        pass

    def add(self, prompt, sampling, service, context, arrival_s, reasoning):
        if max(prompt) >= 100:
            raise UserError("token outside of the vocabulary")
        self._next_id += 1
        self.arrivals_s.append(arrival_s)
        self._left[self._next_id] = sampling.max_new_tokens
        self._asked[self._next_id] = prompt, sampling.max_new_tokens
        return self._next_id

    def abort(self, request_id):
        self._left.pop(request_id, None)

    def step(self):
        if self.failure is not None:
            raise self.failure
        deltas, chunks = [], []
        for request_id, left in list(self._left.items()):
            prompt, most = self._asked[request_id]
            if left == most:
                chunks.append(RanChunk(request_id, len(prompt)))
            self._left[request_id] = left - 1
            result = self._result(prompt, most) if left == 1 else None
            if result is not None:
                del self._left[request_id]
            deltas.append(Delta(request_id, "x", result, 5))
        self._ran.append(ObservedStep(0, 0, len(deltas) - len(chunks), tuple(chunks), 1, 1.0, 2.0, 0.0, 10))
        return deltas

    def _result(self, prompt, most):
        return Result(
            *("x" * most, [5] * most, len(prompt), "length", 0.0, [], {}, [len(prompt), 0], 2, 1, 0, 0, 0, 0, 0.0, 0.0),
            *(None, None),
        )

    def ran_steps(self):
        ran, self._ran = self._ran, []
        return ran

    def observe(self):
        return Observation((), 0, 16, HELD)

    def prefilled_tokens(self, request_id):
        return 0

    def close(self):
        pass


@contextlib.asynccontextmanager
async def served(lines, *, keys=(), limits=LIMITS, recovery=RECOVERY, as_json=True, most_bytes=10_000, **settings):
    """A client, and the engine behind it. lines: have what the log writes."""
    llm, log = Counting(), ServerLog(as_json)
    log._put = lines.append
    serving = Serving(llm, Driver(llm, limits, recovery), "small", 0, log=log, **settings)
    app = build(serving, AccessControl(keys, most_bytes))
    serving.driver.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            yield client, llm, serving
    finally:
        await serving.driver.close()


def run(test, lines=None, **settings):
    async def whole():
        async with served([] if lines is None else lines, **settings) as found:
            await test(*found)

    asyncio.run(asyncio.wait_for(whole(), 120))


async def counted(client, name, **labels):
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    wanted = labels | {"model_name": "small"}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == name and sample.labels == wanted:
                return sample.value
    return None


def test_a_request_is_one_line_with_an_id_of_ours():
    lines = []

    async def test(client, llm, serving):
        body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "theirs"})
        assert answer.status_code == 200
        (line,) = map(json.loads, lines)
        assert answer.headers.get_list("x-request-id") == [line["id"]]
        assert answer.json()["id"] == f"cmpl-{line['id']}"
        assert line["id"] != "theirs"
        assert "theirs" not in lines[0]
        numbers = {name: line[name] for name in ("requests", "prompt_tokens", "new_tokens", "cached_tokens", "status")}
        assert numbers == {"requests": 4, "prompt_tokens": 10, "new_tokens": 16, "cached_tokens": 8, "status": 200}
        assert (line["event"], line["route"], line["finish_reason"]) == ("request", "/v1/completions", "length")
        assert 0 <= line["ttft_s"] <= line["duration_s"]
        assert await counted(client, "longhelix:request_success_total", finished_reason="length") == 4
        assert await counted(client, "longhelix:generation_tokens_total") == 16
        assert await counted(client, "longhelix:prompt_tokens_total") == 10
        assert await counted(client, "longhelix:prefix_cache_hits_total") == 8
        assert await counted(client, "longhelix:request_queue_time_seconds_count") == 4
        assert await counted(client, "longhelix:request_params_max_tokens_sum") == 16
        assert len(lines) == 1, "scrapes are no lines"

    run(test, lines)


def test_a_request_counts_from_its_coming_and_not_from_when_its_text_is_read():
    def encode(text):
        time.sleep(0.2)
        return [1, 2, 3]

    async def test(client, llm, serving):
        llm.tokenizer = types.SimpleNamespace(encode=encode, longest_token=10)
        begun_s = time.monotonic()
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
        (arrival_s,) = llm.arrivals_s
        assert begun_s <= arrival_s <= time.monotonic() - 0.2
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert await counted(client, f"longhelix:{name}_sum") >= 0.2

    run(test)


def test_refusals_are_lines_and_counts_by_status_and_code():
    lines = []

    async def test(client, llm, serving):
        key = {"authorization": "Bearer first"}
        assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        client.headers.update(key)
        for body in ({"prompt": ""}, {"prompt": [1] * 64}, {"prompt": [100]}):
            assert (await client.post("/v1/completions", json=body)).status_code == 400
        assert (await client.post("/v1/completions", json={"prompt": [1] * 50, "n": 9})).status_code == 400
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/no%0Awhere?x=%0Aforged")).status_code == 404
        assert (await client.post("/v1/completions", content=b"x" * 20_000)).status_code == 413
        serving.is_draining = True
        assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 503
        found = [json.loads(line) for line in lines]
        assert [(line["status"], line["code"], line["route"]) for line in found] == [
            (401, "invalid_api_key", "/v1/completions"),
            (401, "invalid_api_key", "/metrics"),
            (400, "invalid_argument", "/v1/completions"),
            (400, "context_length_exceeded", "/v1/completions"),
            (400, "invalid_argument", "/v1/completions"),
            (400, "invalid_argument", "/v1/completions"),
            (404, "model_not_found", "/v1/models/{name}"),
            (404, "not_found", "other"),
            (413, "body_too_large", "/v1/completions"),
            (503, "shutting_down", "/v1/completions"),
        ]
        assert len({line["id"] for line in found}) == len(found)
        for status, code, count in (
            ("401", "invalid_api_key", 2),
            ("400", "invalid_argument", 3),
            ("404", "not_found", 1),
        ):
            assert await counted(client, "longhelix:request_refusals_total", status=status, code=code) == count
        for reason in ("stop", "length", "abort", "error"):
            assert await counted(client, "longhelix:request_success_total", finished_reason=reason) == 0
        assert await counted(client, "longhelix:request_params_max_tokens_count") == 0

    run(test, lines, keys=("first",))


def test_too_many_that_wait_are_refusals():
    async def test(client, llm, serving):
        body = {"prompt": [1] * 20, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body | {"prompt": [[1] * 20] * 2})).status_code == 429
        assert await counted(client, "longhelix:request_refusals_total", status="429", code="overloaded") == 1

    run(test, limits=Limits(8, 30))


@pytest.mark.parametrize("limits", [Limits(1, 1000), Limits(8, 2)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_nothing_is_read_where_as_much_waits_as_may(path, limits):
    read = []

    async def body():
        read.append(path)
        yield b"{"

    async def test(client, llm, serving):
        step, llm.step = llm.step, list  # nothing comes
        ask = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1}))
        while not serving.driver.waiting:
            await asyncio.sleep(0.01)
        answer = await client.post(path, content=body(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        assert read == []
        llm.step = step
        assert (await ask).status_code == 200
        answer = await client.post(path, content=body(), headers={"content-type": "application/json"})
        assert (answer.status_code, read) == (400, [path])

    run(test, limits=limits)


def test_texts_wait_for_threads_of_their_own():
    """So that whatever else runs beside the event loop does not wait for them; and no more of them than may."""

    async def test(client, llm, serving):
        held, encoded = Event(), []

        def encode(text):
            encoded.append(current_thread())
            assert held.wait(20)
            return [1]

        llm.tokenizer.encode, llm.tokenizer.encode_chat, llm.tokenizer.longest_token = encode, None, 9
        most = serving.driver.most_requests + _TEXT_THREADS
        asking = [asyncio.create_task(client.post("/tokenize", json={"prompt": "x"})) for _ in range(most)]
        while len(encoded) < _TEXT_THREADS:
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*(asyncio.to_thread(len, "after") for _ in range(40))) == [5] * 40
        answer = await client.post("/tokenize", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        held.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * most
        assert len(set(encoded)) == _TEXT_THREADS

    run(test)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")]
)
def test_messages_become_what_templates_take_off_the_event_loop(monkeypatch, path, field):
    """There may be very many."""
    threads, for_template = [], Message.for_template

    def watched(message, *given):
        threads.append(current_thread())
        return for_template(message, *given)

    async def test(client, llm, serving):
        llm.tokenizer.encode_chat, llm.tokenizer.longest_token = lambda messages, **rendering: [len(messages)], 9
        answer = await client.post(path, json={field: [{"role": "user", "content": "x"}] * 3})
        assert (answer.status_code, len(threads)) == (200, 3)
        assert current_thread() not in threads

    monkeypatch.setattr(Message, "for_template", watched)
    run(test)


@pytest.mark.parametrize("text", ['{"x": [[], {}, 1]}', " " * LONG_TEXT + '{"x": [[], {}, 1]}'])
def test_the_arguments_of_all_calls_are_bounded_together(monkeypatch, text):
    """Each is within the bounds of one text, be it short or long."""
    monkeypatch.setattr(json_reader, "MOST_VALUES", 100)  # each has five
    calls = [{"function": {"name": "f", "arguments": text}}] * 10
    message = {"role": "assistant", "tool_calls": calls}

    async def test(client, llm, serving):
        most = [Message(**message)] * 2
        assert await serving.token_ids(lambda told: [len(told)], most, "messages") == array("i", [2])
        with pytest.raises(UserError, match=r"messages\[2\].*of earlier calls, has more than 100 values"):
            await serving.token_ids(lambda told: [len(told)], [*most, Message(**message)], "messages")

    run(test)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")]
)
def test_the_servers_own_variables_of_templates_are_defaults(path, field):
    given = []

    async def test(client, llm, serving):
        serving.chat_template_kwargs = {"enable_thinking": False, "style": "short"}
        llm.tokenizer.encode_chat = lambda messages, variables, **ending: given.append(variables) or [1]
        llm.tokenizer.longest_token = 9
        for asked in ({}, {"enable_thinking": True}):
            body = {field: [{"role": "user", "content": "x"}], "chat_template_kwargs": asked}
            assert (await client.post(path, json=body)).status_code == 200

    run(test)
    assert given == [{"enable_thinking": False, "style": "short"}, {"enable_thinking": True, "style": "short"}]


def test_a_client_that_goes_away_is_an_abort():
    lines = []

    async def test(client, llm, serving):
        llm.step = list  # nothing comes
        ask = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1, 2]}))
        while not (llm.has_work and not serving.driver._queued):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # its answer is waited for
        ask.cancel()
        await asyncio.wait((ask,))
        del llm.step
        while serving.driver.waiting:
            await asyncio.sleep(0.01)
        assert await counted(client, "longhelix:request_success_total", finished_reason="abort") == 1
        assert await counted(client, "longhelix:prompt_tokens_total") == 0
        assert await counted(client, "longhelix:num_requests_waiting") == 0
        (line,) = map(json.loads, lines)
        assert (line["finish_reason"], line["new_tokens"]) == ("abort", 0)

    run(test, lines)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
def test_prompts_are_spelled_once_and_off_the_event_loop(streams, max_tokens):
    """However many choices begin with them."""
    spelled = []

    def spell(token_ids, begins=True):
        spelled.append((list(token_ids), current_thread()))
        return "".join(map(str, token_ids))

    async def test(client, llm, serving):
        llm.tokenizer.spell = spell
        body = {"prompt": [[1, 2, 3], [4, 5]], "n": 3, "echo": True, "max_tokens": max_tokens, "stream": streams}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        texts = [""] * 6
        if streams:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            for choice in (json.loads(line)["choices"][0] for line in lines):
                texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == ["123" + "x" * max_tokens] * 3 + ["45" + "x" * max_tokens] * 3
        assert [token_ids for token_ids, _ in spelled] == [[1, 2, 3], [4, 5]]
        assert current_thread() not in [thread for _, thread in spelled]

    run(test)


def test_the_engine_gets_one_array_of_a_prompt_for_all_its_choices():
    """Lists would be gone through once for each, on its thread."""

    async def test(client, llm, serving):
        given = []
        add = llm.add

        def watched(prompt, *more, **named):
            given.append(prompt)
            return add(prompt, *more, **named)

        llm.add, llm.tokenizer.longest_token = watched, 9
        for prompt in ([1, 2, 3], "\1\2\3"):
            given.clear()
            llm.tokenizer.encode = lambda text: list(map(ord, text))
            answer = await client.post("/v1/completions", json={"prompt": prompt, "n": 4, "max_tokens": 1})
            assert answer.status_code == 200
            assert len(given) == 4
            assert all(each is given[0] for each in given)
            assert given[0] == array("i", [1, 2, 3])

    run(test)


@pytest.mark.parametrize("streams", [False, True])
def test_a_body_is_not_kept_while_its_answer_is_waited_for(streams):
    megabytes = 8

    async def body():
        for _ in range(megabytes):
            yield b" " * 2**20
        yield json.dumps({"prompt": [1, 2], "max_tokens": 3, "stream": streams}).encode()

    async def test(client, llm, serving):
        llm.step = list  # nothing comes
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            head = {"content-type": "application/json"}
            ask = asyncio.create_task(client.post("/v1/completions", content=body(), headers=head))
            while not (llm.has_work and not serving.driver._queued):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            kept, most = (now - before for now in tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        del llm.step
        assert (await ask).status_code == 200
        assert kept < 2**20 < megabytes * 2**20 < most

    run(test, most_bytes=2**24)


def test_no_route_takes_a_body_that_is_nested_too_deep():
    def nested(levels, opening, closing):
        """A body of so many."""
        return ('{"prompt": [1], "x": ' + opening * (levels - 1) + "1" + closing * (levels - 1) + "}").encode()

    async def test(client, llm, serving):
        paths = [path for path, found in (await client.get("/openapi.json")).json()["paths"].items() if "post" in found]
        assert len(paths) > 5
        for ends in (("[", "]"), ('{"a":', "}")):
            for path in paths:
                for levels in (DEEPEST + 1, 300, 5000):
                    answer = await client.post(path, content=nested(levels, *ends), headers=head)
                    assert (answer.status_code, "nested deeper than" in answer.text) == (400, True), (path, levels)
            answer = await client.post("/v1/completions", content=nested(DEEPEST, *ends), headers=head)
            assert answer.status_code == 200

    head = {"content-type": "application/json"}
    run(test, most_bytes=100_000)


def test_all_refusals_are_documented_and_no_page_has_scripts_from_elsewhere():
    async def test(client, llm, serving):
        for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
            assert (await client.get(path)).status_code == 404
        document = (await client.get("/openapi.json")).json()
        for path, routes in document["paths"].items():
            for route in routes.values():
                assert {"401", "403", "408"} <= route["responses"].keys() or path in ("/health", "/ready")
        assert "://" not in (await client.get("/")).text

    run(test)


def test_restarts_are_counted():
    async def test(client, llm, serving):
        llm.restart = lambda failures, **told: setattr(llm, "failure", None)
        llm.failure = EngineError("rank 1 failed")
        assert (await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})).status_code == 200
        assert await counted(client, "longhelix:engine_restarts_total") == 1
        assert await counted(client, "longhelix:engine_up") == 1

    run(test)


def test_a_server_whose_engine_restarts_is_healthy_and_not_ready():
    async def test(client, llm, serving):
        may_start = Event()

        def restart(failures, **told):
            assert may_start.wait(60)
            llm.failure = None

        async def states():
            answers = [await client.get(path) for path in ("/health", "/ready")]
            assert answers[0].json()["status"] == answers[1].json()["status"]
            return answers[0].json()["status"], *(answer.status_code for answer in answers)

        async def until(status):
            async with asyncio.timeout(60):
                while (await states())[0] != status:
                    await asyncio.sleep(0.01)

        llm.restart = restart
        assert await states() == ("ok", 200, 200)
        llm.failure = EngineError("rank 1 failed")
        body = {"prompt": [1], "max_tokens": 1}
        interrupted = asyncio.create_task(client.post("/v1/completions", json=body))
        try:
            await until("restarting")
            assert await states() == ("restarting", 200, 503)
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "restarting"
        finally:
            may_start.set()
        assert (await interrupted).status_code == 200
        assert await states() == ("ok", 200, 200)
        serving.is_draining = True
        assert await states() == ("draining", 200, 503)

    run(test)


def test_an_engine_that_fails_is_said_once_and_in_one_line():
    lines = []

    async def test(client, llm, serving):
        llm.failure = EngineError("rank 1 failed:\n\x1b[31mwhat\u2028a client said")
        answer = await client.post("/v1/completions", json={"prompt": [1]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == (
            "engine_failed",
            "the engine has failed: see the server's log for the reason",
        )
        assert await counted(client, "longhelix:engine_up") == 0
        assert await counted(client, "longhelix:request_success_total", finished_reason="error") == 1
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed")

    run(test, lines, as_json=False, recovery=Recovery(restarts=0))
    assert [line.split()[0] for line in lines] == ["the", "request", "request", "request"]
    assert lines[0] == "the engine has failed: rank 1 failed:\\n\\x1b[31mwhat\\u2028a client said"
    assert "status=503 code=engine_failed" in lines[1]
    assert "finish_reason=error" in lines[1]


@pytest.mark.parametrize("prefix", ["longhelix", "vllm"])
def test_head_has_what_get_has_without_its_body(prefix):
    async def test(client, llm, serving):
        got, head = await client.get("/metrics"), await client.head("/metrics")
        assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"])
        assert got.headers["content-type"].startswith("text/plain")
        assert await counted(client, f"{prefix}:num_requests_running") == 0
        assert {"get", "head"} == (await client.get("/openapi.json")).json()["paths"]["/metrics"].keys()
        assert (await client.put("/metrics")).headers["allow"] == "GET, HEAD"

    run(test, metrics_prefix=prefix)


LONG = {"x": "a" * LONG_TEXT}  # a field that makes a body a long one
HEAD = {"content-type": "application/json"}


def test_long_bodies_are_read_and_checked_off_the_event_loop(monkeypatch):
    threads, read = [], reading.read_json
    monkeypatch.setattr(reading, "read_json", lambda text: threads.append(current_thread()) or read(text))

    async def test(client, llm, serving):
        llm.tokenizer.encode, llm.tokenizer.encode_chat = lambda text: [1], None
        for path in ("/v1/completions", "/tokenize"):
            answer = await client.post(path, json={"prompt": "ab", "max_tokens": 1} | LONG)
            assert answer.status_code == 200
        assert current_thread() not in threads
        await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})
        assert current_thread() in threads, "a short one is not worth it"

    run(test, most_bytes=10**6)


@pytest.mark.parametrize(
    "fields", [{"prompt": ""}, {"prompt": [1], "max_tokens": -1}, {}, {"prompt": [1], "stop_token_ids": ["a"]}]
)
def test_what_is_wrong_with_a_long_body_is_said_as_of_a_short_one(fields):
    async def test(client, llm, serving):
        short = await client.post("/v1/completions", json=fields)
        long = await client.post("/v1/completions", json=fields | LONG)
        assert (short.status_code, short.json()) == (long.status_code, long.json())
        assert short.status_code == 400
        broken = await client.post("/v1/completions", content=b" " * LONG_TEXT + b'{"prompt": }', headers=HEAD)
        assert broken.json()["error"]["code"] == "invalid_json"
        assert (await client.post("/v1/completions", content=b'{"prompt": "\xff"}', headers=HEAD)).status_code == 400

    run(test, most_bytes=10**6)


def test_no_route_takes_a_body_of_very_many_values(monkeypatch):
    """Nor is what nobody knows kept while an answer is waited for."""
    monkeypatch.setattr(json_reader, "MOST_VALUES", 20_000)

    async def test(client, llm, serving):
        paths = [path for path, found in (await client.get("/openapi.json")).json()["paths"].items() if "post" in found]
        many = b'{"prompt": [1], "x": [' + b"[]," * 20_000 + b"[]]}"
        for path in paths:
            answer = await client.post(path, content=many, headers=HEAD)
            assert (answer.status_code, "values" in answer.text) == (400, True), path
        serving.requests, found = lambda body, *more, **given: found.append(body) or requests(body, *more, **given), []
        requests = type(serving).requests.__get__(serving)
        assert (await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1} | LONG)).status_code == 200
        assert not found[0].model_extra

    run(test, most_bytes=10**7)


def test_texts_of_all_answers_together_are_bounded(monkeypatch):
    """Those that wait for their clients, and of one answer as many choices as it may have."""
    monkeypatch.setattr(serving_module, "_ANSWERS_BYTES", 1000)
    monkeypatch.setattr(serving_module, "_FEW", 0)

    async def test(client, llm, serving):
        spell = {"most_characters": len, "spell": lambda ids, begins: "x" * len(ids)}
        vars(llm.tokenizer).update(encode=lambda text: [1] * 60, encode_chat=None, **spell)
        echo = {"echo": True, "max_tokens": 0, "n": 8}
        calls = [({"prompt": "a" * 900} | echo, "/v1/completions"), ({"prompt": [1] * 60} | echo, "/v1/completions")]
        calls += [({"tokens": [1] * 900}, "/detokenize"), ({"prompt": "a" * 90}, "/tokenize")]
        for body, path in calls:
            release = serving.answer_memory.reserve(950)
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.headers.get("Retry-After")) == (429, "1"), refused.text
            release()
            assert (await client.post(path, json=body)).status_code == 200, path
            assert serving.answer_memory.held_bytes == 0, path

    run(test)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_echoes_is_never_whole_in_memory(streams):
    """64 times its prompt, it is made choice by choice."""
    prompt = "echo " * 20_000

    async def test(client, llm, serving):
        llm.tokenizer.encode = lambda text: [1]
        app, sizes = client._transport.app, []

        async def receive():
            return messages.pop(0) if messages else await asyncio.sleep(60)

        async def send(message):
            sizes.append(len(message.get("body", b"")))

        body = json.dumps({"prompt": prompt, "n": 64, "echo": True, "max_tokens": 0, "stream": streams}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        scope["headers"] = [(b"content-type", b"application/json")]
        tracemalloc.start()
        try:
            await app(scope, receive, send)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sum(sizes) > 64 * len(prompt)
        assert max(sizes) < 2**19
        assert most < 24 * len(prompt)

    run(test, most_bytes=10**6, limits=Limits(64, 10**6))


def test_long_answers_keep_no_short_one_waiting():
    """Neither the thread that makes them, nor that which reads long texts."""
    held, running = Event(), Event()

    async def test(client, llm, serving):
        def encode(text):
            if len(text) > 10**6:
                running.set()
                held.wait(20)
            return [1]

        llm.tokenizer.encode, llm.tokenizer.encode_chat = encode, None
        tasks = [
            asyncio.create_task(client.post("/tokenize", json={"prompt": "a" * (10**6 + 1)}))
            for _ in range(2 * _TEXT_THREADS)
        ]
        await asyncio.to_thread(running.wait, 20)
        serving.long_answers._threads.submit(held.wait, 20)
        answer = await asyncio.wait_for(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}), 20)
        assert answer.status_code == 200
        held.set()
        assert {(await task).status_code for task in tasks} == {200}

    run(test, most_bytes=10**7)
