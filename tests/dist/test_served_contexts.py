"""Saved contexts over HTTP: computed beside other requests, listed, gone on after, replaced, deleted, refused."""

import contextlib
import os
import resource
import signal
import time
from urllib.parse import quote

import httpx
import pytest
from served import served, settled

from longhelix.serve import contexts as served_contexts
from longhelix.serve.engine_thread import Recovery

pytestmark = pytest.mark.dist

GREEDY = {"temperature": 0, "max_tokens": 8}
QUESTION = " The capital of France is"
CHUNKS = {"chunk_tokens": 16}  # so that a long context takes many steps


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    with served(contexts_dir=folder, **CHUNKS) as (client, llm):
        yield client, llm, folder


def ended(client, name):
    """What a context has come to."""
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        found = client.get(f"/v1/contexts/{name}").json()
        if found["status"] in ("ready", "failed"):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{name} is still {found}")


def save(client, name, **body):
    answer = client.post("/v1/contexts", json={"id": name, **body})
    assert answer.status_code == 202, answer.text
    assert answer.json()["status"] in ("computing", "saving", "ready")
    return ended(client, name)


def test_a_prompt_goes_on_after_a_context_as_after_its_text(server):
    client, llm, folder = server
    text = "One, two, three, four, five, six, seven, eight, nine, ten. " * 6
    ids = llm.tokenizer.encode(text)
    found = save(client, "numbers", prompt=text)
    assert found == {
        "id": "numbers",
        "object": "context",
        "status": "ready",
        "prefilled_tokens": len(ids),
        "num_tokens": len(ids),
        "saved_at": found["saved_at"],
        "bytes": sum(file.stat().st_size for file in (folder / "numbers").glob("rank-*")),
        "error": None,
    }
    assert found["saved_at"].endswith("+00:00")
    assert client.get("/v1/contexts").json() == {"object": "list", "data": [found]}
    whole = {"prompt": ids + llm.tokenizer.encode_more(QUESTION), "cache_salt": "fresh", **GREEDY}
    expected = client.post("/v1/completions", json=whole).json()
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for given in (QUESTION, llm.tokenizer.encode_more(QUESTION)):
        body = {"prompt": given, "context": "numbers", **GREEDY}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) // 16 * 16
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "echo": True}) as got:
            assert got.read().decode().startswith('data: {"id":')
    too_long = client.post("/v1/completions", json={"prompt": [7] * (2041 - len(ids)), "context": "numbers", **GREEDY})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    both = client.post("/v1/completions", json={"prompt": "x", "context": "numbers", "echo": True, "logprobs": 1})
    assert (both.status_code, "leave out context" in both.json()["error"]["message"]) == (400, True)
    assert client.delete("/v1/contexts/numbers").json() == {
        "id": "numbers",
        "object": "context.deleted",
        "deleted": True,
    }
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_one_that_finds_no_room_now_waits_for_its_turn(tmp_path):
    """And is computed then, with the same tokens."""
    with served(contexts_dir=tmp_path, kv_cache_tokens=1024, max_model_len=1024) as (client, llm):
        save(client, "long", prompt=[11] * 600)
        body = {"prompt": [5, 7, 9], "context": "long", **GREEDY}
        expected = client.post("/v1/completions", json=body).json()
        other = {"prompt": [13] * 600, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=other) as got:
            lines = got.iter_lines()
            next(lines)
            with httpx.Client(base_url=client.base_url, timeout=60) as second:
                answer = second.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected["choices"]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < 592
        assert settled(client, llm)


@pytest.mark.slow
def test_messages_go_on_after_messages(server):
    """As the conversation of both does: without a second system prompt between them."""
    client, _, _ = server
    story = {"role": "system", "content": "Tom has a red hat, a blue coat and a green bag. " * 4}
    question = {"role": "user", "content": "What colour is the hat?"}
    save(client, "story", messages=[story])
    whole = client.post(
        "/v1/chat/completions", json={"messages": [story, question], "cache_salt": "x", **GREEDY}
    ).json()
    body = {"messages": [question], "context": "story", **GREEDY}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    response = {"input": [question], "context": "story", "temperature": 0, "max_output_tokens": 8}
    found = client.post("/v1/responses", json=response).json()
    assert found["output"][0]["content"][0]["text"] == whole["choices"][0]["message"]["content"]
    assert client.delete("/v1/contexts/story").status_code == 200


def test_others_are_answered_while_one_is_computed_and_its_client_may_go(server):
    client, _, _ = server
    with httpx.Client(base_url=client.base_url, timeout=60) as other:
        begun = other.post("/v1/contexts", json={"id": "long", "prompt": [11] * 600})
    assert (begun.status_code, begun.json()["status"], begun.json()["num_tokens"]) == (202, "computing", 600)
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    found = client.get("/v1/contexts/long").json()
    assert (found["status"], found["prefilled_tokens"] < 600, found["bytes"]) == ("computing", True, None)
    again = client.post("/v1/contexts", json={"id": "long", "prompt": [11] * 600, "replace": True})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "context_exists")
    not_yet = client.post("/v1/completions", json={"prompt": "x", "context": "long", **GREEDY})
    assert (not_yet.status_code, not_yet.json()["error"]["param"]) == (404, "context")
    assert ended(client, "long")["status"] == "ready"
    assert client.delete("/v1/contexts/long").status_code == 200


def test_one_that_is_deleted_while_it_is_computed_leaves_nothing(server):
    client, llm, folder = server
    client.post("/v1/contexts", json={"id": "gone", "prompt": [13] * 1900})
    assert client.delete("/v1/contexts/gone").status_code == 200
    assert client.get("/v1/contexts/gone").status_code == 404
    assert client.delete("/v1/contexts/gone").status_code == 404
    assert settled(client, llm)
    assert client.get("/v1/contexts").json()["data"] == []
    assert os.listdir(folder) == []


def test_a_name_is_given_once_unless_it_is_replaced(server):
    client, _, _ = server
    save(client, "two words", prompt=[3] * 40)
    refused = client.post("/v1/contexts", json={"id": "two words", "prompt": [4] * 50})
    assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
        409,
        "context_exists",
        "id",
    )
    assert save(client, "two words", prompt=[4] * 50, replace=True)["num_tokens"] == 50
    assert client.delete("/v1/contexts/two%20words").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"id": "../x", "prompt": [1] * 40}, 400, "id"),
        ({"id": "a/b", "prompt": [1] * 40}, 400, "id"),
        ({"id": ".hidden", "prompt": [1] * 40}, 400, "id"),
        ({"id": "", "prompt": [1] * 40}, 400, "id"),
        ({"id": "x" * 200, "prompt": [1] * 40}, 400, "id"),
        ({"id": 7, "prompt": [1] * 40}, 400, "id"),
        ({"prompt": [1] * 40}, 400, "id"),
        ({"id": "x"}, 400, "prompt"),
        ({"id": "x", "prompt": "a" * 100, "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ({"id": "x", "prompt": ["a", "b"]}, 400, "prompt"),
        ({"id": "x", "prompt": [10**6] * 40}, 400, "prompt"),
        ({"id": "x", "prompt": [1] * 2048}, 400, "prompt"),
        ({"id": "x", "prompt": [1] * 15}, 400, None),
        ({"id": "x", "messages": []}, 400, "messages"),
        ({"id": "x", "prompt": [1] * 40, "replace": "yes"}, 400, "replace"),
    ],
)
def test_what_cannot_be_saved_is_refused(server, body, status, param):
    client, _, folder = server
    answer = client.post("/v1/contexts", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert str(folder) not in answer.text
    assert "--" not in error["message"]
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", ["nowhere", "..%2F..%2Fetc", "%2e%2e", ".unfinished-x", "a%2Fb", "a%00b"])
def test_names_lead_nowhere_else(server, name):
    client, _, folder = server
    for answer in (client.get(f"/v1/contexts/{name}"), client.delete(f"/v1/contexts/{name}")):
        assert answer.status_code in (400, 404, 405)
        assert str(folder) not in answer.text
    asked = client.post("/v1/completions", json={"prompt": "x", "context": "nowhere", **GREEDY})
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "unknown_context")
    assert str(folder) not in asked.text


def test_a_damaged_one_is_shown_and_not_used(server):
    client, _, folder = server
    save(client, "damaged", prompt=[5] * 40)
    path = folder / "damaged" / "context.json"
    path.write_bytes(path.read_bytes()[:-5])
    found = client.get("/v1/contexts/damaged").json()
    assert (found["status"], found["error"]["code"]) == ("failed", "invalid_context")
    assert client.get("/v1/contexts").json()["data"] == [found]
    answer = client.post("/v1/completions", json={"prompt": "x", "context": "damaged", **GREEDY})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_context")
    assert str(folder) not in found["error"]["message"] + answer.text
    assert client.delete("/v1/contexts/damaged").status_code == 200


def test_folders_whose_names_no_context_may_have_are_listed_and_deleted(server):
    client, _, folder = server
    save(client, "sound", prompt=[5] * 40)
    for name in (b"not \xff UTF-8", b"back\\slash", b"x" * 200):
        os.mkdir(os.path.join(os.fsencode(folder), name))
    (folder / "file").write_text("it")
    listed = {one["id"]: one for one in client.get("/v1/contexts").json()["data"]}
    assert listed.pop("sound")["status"] == "ready"
    assert sorted(listed) == ["back\\\\slash", "not \\udcff UTF-8", "x" * 200]
    for name, one in listed.items():
        assert (one["status"], one["error"]["code"]) == ("failed", "invalid_context")
        path = f"/v1/contexts/{quote(name, safe='')}"
        assert client.get(path).json()["id"] == name
        assert client.delete(path).status_code == 200
        assert client.delete(path).status_code in (400, 404)
    for path in ("/v1/contexts/%FF", "/v1/contexts/a%ED%A0%80"):
        assert {client.get(path).status_code, client.delete(path).status_code} <= {400, 404}
    refused = client.post("/v1/contexts", json={"id": "file", "prompt": [5] * 40})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "context_exists")
    (folder / "file").unlink()
    assert client.delete("/v1/contexts/sound").status_code == 200
    assert os.listdir(folder) == []


def test_so_many_are_computed_at_a_time(server, monkeypatch):
    client, llm, _ = server
    monkeypatch.setattr(served_contexts, "_MOST_AT_A_TIME", 2)
    for number in range(2):
        assert client.post("/v1/contexts", json={"id": f"many-{number}", "prompt": [17] * 1900}).status_code == 202
    refused = client.post("/v1/contexts", json={"id": "many-2", "prompt": [17] * 40})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for number in range(2):
        assert client.delete(f"/v1/contexts/many-{number}").status_code == 200
    assert settled(client, llm)


@pytest.mark.slow
def test_a_full_disk_is_the_contexts_own_and_the_server_goes_on(tmp_path):
    """As by a quota, which ranks come to."""
    with served(contexts_dir=tmp_path) as (client, llm):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for process in llm.process_ids.values():
            resource.prlimit(process, resource.RLIMIT_FSIZE, (5000, limits[1]))
        found = save(client, "document", prompt=[1] * 100)
        assert (found["status"], found["error"]["code"], found["bytes"]) == ("failed", "disk_full", None)
        assert str(tmp_path) not in found["error"]["message"]
        assert os.listdir(tmp_path) == []
        for process in llm.process_ids.values():
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)
        assert save(client, "document", prompt=[1] * 100)["status"] == "ready"
        assert settled(client, llm)


@pytest.mark.slow
@pytest.mark.slow
def test_an_engine_that_starts_again_goes_on_with_those_on_their_way(tmp_path):
    with served(contexts_dir=tmp_path, **CHUNKS) as (client, llm):
        client.post("/v1/contexts", json={"id": "document", "prompt": [1] * 1900})
        os.kill(llm.process_ids[1], signal.SIGKILL)
        assert ended(client, "document")["status"] == "ready"
        assert client.get("/health").json()["restarts"] == 1
        answer = client.post("/v1/completions", json={"context": "document", "prompt": [5], "max_tokens": 2}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1888
        assert settled(client, llm)


def test_an_engine_that_fails_for_good_ends_those_on_their_way(tmp_path):
    with served(contexts_dir=tmp_path, recovery=Recovery(restarts=0), **CHUNKS) as (client, llm):
        client.post("/v1/contexts", json={"id": "document", "prompt": [1] * 1900})
        os.kill(llm.process_ids[1], signal.SIGKILL)
        found = ended(client, "document")
        assert (found["status"], found["error"]["code"]) == ("failed", "engine_failed")
        assert client.post("/v1/contexts", json={"id": "other", "prompt": [1] * 100}).status_code == 503
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_stop_leaves_no_half_of_one(tmp_path):
    """Those that are not done in the time that they have are given up."""
    with contextlib.ExitStack() as stack:
        client, llm = stack.enter_context(served(contexts_dir=tmp_path, **CHUNKS))
        slow = llm._core._loop.step
        llm._core._loop.step = lambda timeout_s: (time.sleep(0.2), slow(timeout_s))[1]
        assert client.post("/v1/contexts", json={"id": "document", "prompt": [1] * 1900}).status_code == 202
    assert os.listdir(tmp_path) == []
