"""The server over a real engine of two ranks: OpenAI's forms, streams, errors, clients that go away, keys, bounds."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from served import MOST_BODY_BYTES, events, served, settled

from longhelix import LLM, Layout, SamplingParams
from longhelix.serve.driver import Limits
from longhelix.serve.engine_thread import Recovery
from oracle import FAMILIES, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server():
    with served(chunk_tokens=128) as both:
        yield both


def test_completions_are_what_the_engine_says(server):
    client, _ = server
    prompts = [PROMPT, "One, two, three,"]
    with LLM("builtin", Layout(kvp=2), kv_cache_tokens=8192, max_model_len=2048) as llm:
        expected = llm.generate(prompts, SamplingParams(max_new_tokens=12, logprobs=3))
        ids = llm.tokenizer.encode(PROMPT)
    answer = client.post("/v1/completions", json={"prompt": prompts, "logprobs": 3, **GREEDY}).json()
    assert [choice["text"] for choice in answer["choices"]] == [result.text for result in expected]
    assert answer["usage"]["prompt_tokens"] == sum(result.prompt_tokens for result in expected)
    assert answer["usage"]["completion_tokens"] == 24
    for choice, result in zip(answer["choices"], expected, strict=True):
        chosen = [found[token] for token, found in zip(result.token_ids, result.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-3)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["finish_reason"] == result.finish_reason
    as_ids = client.post("/v1/completions", json={"prompt": ids, **GREEDY}).json()
    assert as_ids["choices"][0]["text"] == expected[0].text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_prompts_logprobs(server, max_tokens):
    """As programs that compare models ask for them."""
    client, llm = server
    ids = llm.tokenizer.encode(PROMPT)
    body = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": max_tokens}
    answer, again = (client.post("/v1/completions", json=body | {"prompt": given}).json() for given in (PROMPT, ids))
    assert answer["choices"] == again["choices"]
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(found["tokens"]) == choice["text"]
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    for at, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert choice["text"][at:].startswith(token)
    for at in range(1, len(ids)):
        # What comes after the tokens before it, asked for as an answer.
        asked = {"prompt": ids[:at], "temperature": 0, "max_tokens": 1, "logprobs": 2}
        other = client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        mine = found["top_logprobs"][at]
        assert mine[found["tokens"][at]] == found["token_logprobs"][at]
        assert len(mine) in (2, 3)
        assert dict(list(mine.items())[:2]) == {
            token: pytest.approx(logprob, abs=0.1) for token, logprob in other.items()
        }
        assert found["token_logprobs"][at] <= max(mine.values())
    several = client.post("/v1/completions", json=body | {"prompt": [ids, ids], "n": 2}).json()["choices"]
    assert [each["logprobs"]["tokens"] for each in several] == [found["tokens"]] * 4
    assert [each["logprobs"]["token_logprobs"][1] for each in several] == [
        pytest.approx(found["token_logprobs"][1], abs=0.1)
    ] * 4
    assert several[0]["logprobs"]["top_logprobs"][: len(ids)] == several[1]["logprobs"]["top_logprobs"][: len(ids)]
    plain = client.post("/v1/completions", json={"prompt": PROMPT, "echo": True, **GREEDY}).json()["choices"][0]
    assert plain["text"].startswith(PROMPT + " Paris")
    with client.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "echo": True, "stream": True, **GREEDY}
    ) as got:
        assert "".join(event["choices"][0]["text"] for event in events(got)) == plain["text"]
    assert client.post("/v1/completions", json=body | {"prompt": "x", "stream": True}).status_code == 400


def test_streams_say_the_same(server):
    client, _ = server
    body = {"messages": [{"role": "user", "content": "Count to five."}], "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.post("/v1/chat/completions", json=body).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True, "stream_options": options}) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        first, *come, last = events(got)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [event["choices"][0] for event in come]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]]
    logprobs = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [token["token"] for token in logprobs] == [
        token["token"] for token in whole["choices"][0]["logprobs"]["content"]
    ]
    assert all(len(token["top_logprobs"]) == 2 for token in logprobs)
    assert bytes(byte for token in logprobs for byte in token["bytes"]).decode() == text
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(logprobs)
    used = [event["usage"]["completion_tokens"] for event in come]
    assert used == sorted(used)
    assert used[-1] == len(logprobs)


def test_choices_have_draws_of_their_own(server):
    client, _ = server
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 12, "temperature": 1.2, "seed": 5}
    one, again = (client.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in one["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    assert one["usage"]["prompt_tokens"] == 5
    second = client.post("/v1/completions", json=body | {"n": 1, "seed": 6}).json()
    assert second["choices"][0]["text"] == texts[1]


def test_a_long_prompt_tells_how_far_it_is(server):
    client, _ = server
    options = {"include_progress": True}
    body = {"prompt": [7] * 500, "max_tokens": 1, "stream": True, "stream_options": options, "cache_salt": "progress"}
    with client.stream("POST", "/v1/completions", json=body) as got:
        lines = list(got.iter_lines())
    told = [json.loads(lines[at + 1][6:]) for at, line in enumerate(lines) if line == "event: progress"]
    counts = [each["prefilled_tokens"] for each in told]
    assert len(counts) >= 2
    assert counts == sorted(set(counts))
    assert all(0 < count <= 500 for count in counts)


@pytest.mark.parametrize("when", ["at once", "prefill", "decode"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_within_five_steps(server, when, streams, monkeypatch):
    """Of its abort: when a client has left, the server learns from the network."""
    client, llm = server
    prompt, new_tokens = ([11] * 40, 1500) if when == "decode" else ([11] * 1900, 100)
    ran, ran_at_abort, ran_steps, abort = [], [], llm.ran_steps, llm.abort

    def counted():
        come = ran_steps()
        ran.extend(come)
        return come

    def aborted(request_id):
        ran_at_abort.append(len(ran))
        return abort(request_id)

    monkeypatch.setattr(llm, "ran_steps", counted)
    monkeypatch.setattr(llm, "abort", aborted)

    async def leave():
        body = {"prompt": prompt, "n": 2, "max_tokens": new_tokens, "ignore_eos": True, "stream": streams}
        async with httpx.AsyncClient(base_url=client.base_url) as other:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout({"at once": 0.02, "prefill": 0.5, "decode": 1.0}[when]):
                    async with other.stream("POST", "/v1/completions", json=body) as got:
                        await got.aread()

    asyncio.run(leave())
    assert settled(client, llm)
    assert len(ran) - min(ran_at_abort, default=0) <= 5
    assert client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY}).status_code == 200


def test_tokens_and_text(server):
    client, llm = server
    found = client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert found == {"tokens": llm.tokenizer.encode(PROMPT), "count": 5, "max_model_len": 2048}
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("assistant\n")


def test_what_the_server_is(server):
    client, _ = server
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert client.get("/v1/models/small").json()["id"] == "small"
    assert client.get("/version").json()["version"]
    assert client.get("/ready").status_code == 200
    assert {"/v1/completions", "/v1/chat/completions"} <= client.get("/openapi.json").json()["paths"].keys()


ANY = {"prompt": "x", "max_tokens": 1}
WRONG = [
    ("max_tokens", [-1, 0, 2**40, 1.5, "3", True, [], {}]),
    ("temperature", [-1, 1e31, "1", True, []]),
    ("top_p", [0, 1.1, "x"]),
    ("top_k", [-2, 2**31, 0.5]),
    ("min_p", [-0.1, 2]),
    ("n", [0, 65, "2"]),
    ("logprobs", [-1, 101, "x"]),
    ("presence_penalty", [2.1, "x"]),
    ("frequency_penalty", [-2.1, []]),
    ("repetition_penalty", [0, -1]),
    (
        "logit_bias",
        [
            {"1": 101},
            {"x": 1},
            {"-1": 1},
            {"99999999": 1},
            {"01": 1},
            {"1": 1, "01": 2},
            [],
            {str(token): 1 for token in range(1025)},
        ],
    ),
    ("stop", ["", ["x"] * 65, [""], 3, "x" * 1001, ["x" * 900] * 3]),
    ("tools", [[{"type": "function"}]]),
    ("response_format", [{"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {"schema": {}}}, 3]),
    ("guided_json", ["{", [], {"type": "strange"}, {"$ref": "#"}, "[]"]),
    ("guided_regex", ["a(b", "", 3, "(?=a)"]),
    ("guided_choice", [[], [""], "a", [3]]),
    ("guided_grammar", ["", "start: foo", "root ::= ((", 5]),
    ("structured_outputs", [{"structural_tag": "x"}, {"regex": "a", "json_object": True}, {"choice": []}, "a"]),
    ("suffix", ["x"]),
    ("context", ["", "../saved", "a/b", ".hidden", 3, ["saved"]]),
    ("stop_token_ids", [[-1], [2**31], ["x"], [10**6], list(range(1025))]),
    ("min_tokens", [-1, 5]),
    ("seed", [-(2**63) - 1, 2**63, "x"]),
    ("stream", ["yes", 1]),
    ("priority", [10**7, "x"]),
    ("client", ["x" * 257, 3]),
    ("ttft_slo_s", [0, -1, "x"]),
    (
        "prompt",
        [
            None,
            [],
            "",
            [[]],
            [[1], "x"],
            [-1],
            [10**6],
            [1.5],
            {"a": 1},
            ["x"] * 1025,
            [True],
            [1, True],
            ["x", 1],
            "x" * 200_000,
        ],
    ),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_what_is_wrong_is_said(server, field, value, streams):
    """Before anything is streamed."""
    client, _ = server
    answer = client.post("/v1/completions", json=ANY | {"stream": streams} | {field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]
    assert error["param"] == field
    assert "--" not in error["message"]


@pytest.mark.parametrize("given", ["text", "ids"])
def test_an_echo_alone_computes_nothing(server, given):
    client, llm = server
    ids = llm.tokenizer.encode(PROMPT)
    steps = client.get("/health").json()["steps"]
    body = {"prompt": [PROMPT, PROMPT] if given == "text" else [ids, ids], "echo": True, "max_tokens": 0, "n": 2}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT] * 4
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * len(ids), 0)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body | options) as got:
        *choices, last = events(got)
    assert [event["choices"][0] for event in choices] == answer["choices"]
    assert last["usage"] == usage
    assert client.get("/health").json()["steps"] == steps
    for wrong in ({"prompt": [10**6]}, {"prompt": [5] * 2048}, {"echo": False}):
        refused = client.post("/v1/completions", json=body | wrong)
        assert (refused.status_code, bool(refused.json()["error"]["param"])) == (400, True)


def test_what_is_served_is_described(server):
    client, _ = server
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert {"application/json", "text/event-stream"} == content.keys()
        assert content["text/event-stream"].keys() == {"itemSchema"}  # `schema` is read as that of each event, too
    for path, routes in paths.items():
        for route in routes.values():
            assert "405" in route["responses"] or path in ("/health", "/ready")
            assert "HTTPValidationError" not in str(route["responses"])


def test_bodies_that_are_none(server):
    client, llm = server
    head = {"content-type": "application/json"}
    for body in (
        b"",
        b"{",
        b"[]",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
    ):
        answer = client.post("/v1/completions", content=body, headers=head)
        assert answer.status_code == 400, (body[:40], answer.text)
        assert answer.json()["error"]["message"]
    answer = client.post("/v1/completions", content=b"x" * (MOST_BODY_BYTES + 1), headers=head)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    def pieces():
        for _ in range(30):
            yield b" " * 50_000

    answer = client.post("/v1/completions", content=pieces(), headers=head)
    assert answer.status_code == 413
    assert client.post("/v1/completions", json={"prompt": [5] * 2048, "max_tokens": 1}).json()["error"]["code"] == (
        "context_length_exceeded"
    )
    assert client.post("/v1/completions", json=ANY | {"model": "other"}).status_code == 404
    assert client.post("/v1/completions", json=ANY | {"never_heard_of": {"a": 1}}).status_code == 200
    assert client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert client.get("/v1/completions").json()["error"]["code"] == "method_not_allowed"
    assert settled(client, llm)


def test_a_wrong_list_is_looked_at_once(server):
    """Its length costs no more than reading it."""
    client, _ = server
    answer = client.post("/v1/completions", json={"prompt": [-1] * 200_000, "stop_token_ids": [-1] * 1000})
    assert answer.status_code == 400
    assert len(answer.content) < 500


@pytest.mark.slow
def test_a_stop_ends_those_that_do_not_end():
    """With an error as the last event, in the time that they have."""
    with served() as (client, _):
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
        come = []

        def ask(url):
            asked = {"json": body | {"stream": True}}
            with httpx.Client(base_url=url, timeout=60) as own, own.stream("POST", "/v1/completions", **asked) as got:
                come.extend(line for line in got.iter_lines() if line)

        asking = threading.Thread(target=ask, args=(client.base_url,))
        asking.start()
        while len(come) < 2:
            time.sleep(0.01)
    asking.join()
    assert json.loads(come[-2][6:])["error"]["code"] == "shutting_down"
    assert come[-1] == "data: [DONE]"


def test_keys_and_bounds():
    with served(Limits(1, 1000), keys=("first", "second")) as (client, _):
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            assert client.get(path).status_code == 401
        for header in ("Bearer third", "first", "Basic first", "Bearer firstsecond", "Bearer"):
            assert client.get("/v1/models", headers={"authorization": header}).status_code == 401
        client.headers["authorization"] = "Bearer second"
        assert client.get("/v1/models").status_code == 200
        long = {"prompt": [9] * 700, "max_tokens": 2}
        threads = [threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": long})]
        threads[0].start()
        while client.get("/health").json()["waiting"] == 0:
            time.sleep(0.01)
        answer = client.post("/v1/completions", json=ANY)
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "overloaded"
        threads[0].join()
        assert client.post("/v1/completions", json=ANY).status_code == 200


@pytest.mark.slow
def test_an_engine_that_may_not_start_again_tells_every_client():
    with served(recovery=Recovery(restarts=0)) as (client, llm):
        body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 2}
        with client.stream("POST", "/v1/completions", json=body) as got:
            lines = got.iter_lines()
            next(lines)
            os.kill(llm.process_ids[1], signal.SIGKILL)
            come = [line for line in lines if line]
        assert come[-1] == "data: [DONE]"
        error = json.loads(come[-2].removeprefix("data: "))["error"]
        assert (error["code"], "rank" in error["message"]) == ("engine_failed", False)
        assert client.get("/health").json()["status"] == "failed"
        assert client.get("/health").status_code == client.get("/ready").status_code == 503
        assert client.post("/v1/completions", json=ANY).status_code == 503


def test_the_command_ends_when_it_is_told_to(tmp_path):
    command = [sys.executable, "-m", "longhelix", "serve", "--model", "builtin"]
    command += ["--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = next(line for line in process.stderr if line.startswith("serving ")).split()[-1]
            with httpx.Client(base_url=url, timeout=60) as client:
                body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as got:
                    lines = got.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    come = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert come[-1]["choices"][0]["finish_reason"] == "length"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_command_that_is_interrupted_twice_ends_at_once_and_tells_its_clients(tmp_path):
    save_tokenizer_files(make_oracle(FAMILIES["llama"], tmp_path, prompt_lengths=(1,)).path)
    command = [sys.executable, "-m", "longhelix", "serve", "--model", str(tmp_path)]
    command += ["--port", "0", "--max-model-len", "9000", "--drain", "600s"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = next(line for line in process.stderr if line.startswith("serving ")).split()[-1]
            body = {"prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as got:
                lines = got.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert next(process.stderr).startswith("draining: 1 requests")
                process.send_signal(signal.SIGINT)
                *_, told, done = (line for line in lines if line)
            assert (json.loads(told.removeprefix("data: "))["error"]["code"], done) == ("shutting_down", "data: [DONE]")
            assert process.wait(60) == 0
            assert [line.split()[0] for line in process.stderr if line.strip()] == ["request", "end"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "other machines can reach the server at 0.0.0.0: give --api-key-file"),
        (["--port", "70000"], "port is 70000"),
        (["--max-waiting-requests", "0"], "max_waiting_requests is 0"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs must be a JSON object"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs is not valid JSON"),
        (["--default-chat-template-kwargs", '{"messages": []}'], "chat_template_kwargs has messages"),
    ],
)
def test_what_cannot_be_served_is_said(capsys, arguments, words):
    from longhelix.cli.main import main

    assert main(["serve", "--model", "builtin", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("logprobs", [False, True])
def test_token_ids_come_with_the_text_of_chats(server, logprobs):
    client, _ = server
    # Characters of several tokens: some tokens come without text.
    body = {"messages": [{"role": "user", "content": "Say: 漢字 🦜"}], "logprobs": logprobs, **GREEDY}
    whole = client.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    with client.stream("POST", "/v1/chat/completions", json=body | {"return_token_ids": True, "stream": True}) as got:
        choices = [event["choices"][0] for event in events(got)]
    told = [choice["token_ids"] for choice in choices if "token_ids" in choice]
    assert [token_id for ids in told for token_id in ids] == whole["token_ids"]
    assert all(len(ids) == 1 for ids in told)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    plain = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert plain["token_ids"] is None
    assert plain["message"] == whole["message"]


def test_token_ids_come_with_their_text(server):
    client, _ = server
    body = {"prompt": PROMPT, "return_token_ids": True, **GREEDY}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
        choices = [json.loads(line[6:])["choices"][0] for line in got.iter_lines() if line.startswith("data: {")]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    text = client.post("/detokenize", json={"tokens": whole["token_ids"]}).json()["prompt"]
    assert text == whole["text"]
    plain = client.post("/v1/completions", json=body | {"return_token_ids": None}).json()["choices"][0]
    assert plain["token_ids"] is None


def test_a_method_that_a_route_lacks_is_told_those_that_it_has(server):
    client, _ = server
    answer = client.put("/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_a_body_without_its_type_is_told_which_one(server):
    client, _ = server
    answer = client.post("/v1/completions", content=json.dumps({"prompt": PROMPT}))
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
