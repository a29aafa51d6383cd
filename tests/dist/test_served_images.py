"""Images in chats over HTTP, by a toy vision-language model: the answer is that of the engine's own `ImagePrompt`."""

import base64
import json
import threading
from io import BytesIO
from pathlib import Path

import pytest
from served import events, served, settled
from shown import NEW_TOKENS, VISION_LANGUAGE, draw, make_shown_oracle

from longhelix import LLM, ImagePrompt, Layout, SamplingParams
from longhelix.engine.vision.tower import Tower
from oracle import save_tokenizer_files

pytestmark = pytest.mark.dist

GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS}
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}w192 w190 w193 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SETTINGS = {"block_tokens": 4, "chunk_tokens": 7, "kv_cache_tokens": 512}
START, IMAGE, END = 192, 190, 193


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = make_shown_oracle(VISION_LANGUAGE["qwen3_vl"], tmp_path_factory.mktemp("qwen3_vl"))
    save_tokenizer_files(made.path)
    (made.path / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def expected(oracle):
    """What the engine itself says of the conversations below."""
    images = oracle.images
    with LLM(str(oracle.path), Layout(kvp=2), **SETTINGS) as llm:
        return llm.generate(
            [
                ImagePrompt([START, IMAGE, END, 5, 6, START, IMAGE, END], [images["a"], images["b"]]),
                ImagePrompt([7, START, IMAGE, END, 8], [images["c"]]),
            ],
            SamplingParams(NEW_TOKENS),
        )


@pytest.fixture(scope="module")
def server(oracle, expected):
    with served(model=str(oracle.path), **SETTINGS) as both:
        yield both


def part(image, form="png", **more):
    written = BytesIO()
    image.save(written, form, lossless=True)
    url = f"data:image/{form};base64,{base64.b64encode(written.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words):
    return {"type": "text", "text": words}


def conversations(images):
    return (
        [{"role": "user", "content": [part(images["a"]), text("w5 w6"), part(images["b"], "webp", detail="high")]}],
        [{"role": "system", "content": "w7"}, {"role": "user", "content": [part(images["c"]), text("w8")]}],
    )


def test_answers_are_those_of_the_engine(server, oracle, expected):
    client, _ = server
    for messages, result in zip(conversations(oracle.images), expected, strict=True):
        body = {"messages": messages, **GREEDY}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == result.text
        assert answer["usage"]["prompt_tokens"] == result.prompt_tokens
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True, "n": 2}) as got:
            choices = [event["choices"][0] for event in events(got)]
        for place in range(2):
            deltas = [choice["delta"].get("content", "") for choice in choices if choice["index"] == place]
            assert "".join(deltas) == result.text
    assert len({result.text for result in expected}) == 2


def test_responses_show_them_too(server, oracle, expected):
    client, _ = server
    (messages, _), result = conversations(oracle.images), expected[0]
    parts = [
        {"type": "input_image", "image_url": each["image_url"]["url"]}
        if each["type"] == "image_url"
        else {"type": "input_text", "text": each["text"]}
        for each in messages[0]["content"]
    ]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": NEW_TOKENS}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == result.text
    assert answer["usage"]["input_tokens"] == result.prompt_tokens


def test_the_tower_runs_beside_the_engines_thread(server, monkeypatch):
    """Once for an image, and the answers to others go on meanwhile."""
    client, llm = server
    ran, go_on, begun = [], threading.Event(), threading.Event()

    def run(tower, patches, run=Tower._run):
        ran.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return run(tower, patches)

    monkeypatch.setattr(Tower, "_run", run)
    body = {"messages": [{"role": "user", "content": [part(draw(2, 3, 21)), text("w8")]}], "n": 2, **GREEDY}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=body)))
    asking.start()
    assert begun.wait(60)
    assert client.post("/v1/completions", json={"prompt": "w8 w9", **GREEDY}).status_code == 200
    go_on.set()
    asking.join()
    assert answers[0].status_code == 200
    assert len(ran) == 1
    assert ran != ["engine"]
    assert llm.image_bytes == 0
    assert settled(client, llm)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}], "invalid_image"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "invalid_image"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "some"}}], None),
        ([{"type": "image_url", "image_url": {}}], None),
        ([{"type": "image_url"}], None),
        ([{"type": "input_audio", "input_audio": {}}], None),
        ([part(draw(8, 8, 1)), part(draw(8, 8, 2))], "context_length_exceeded"),
        ([part(draw(1, 1, 1)), text("w190")], None),  # a place that no image is for
        ([part(draw(8, 8, 1).resize((1000, 2)))], "invalid_image"),
    ],
)
def test_what_is_wrong_with_images_is_said(server, content, code):
    client, llm = server
    body = {"messages": [{"role": "user", "content": content}], **GREEDY}
    for streams in (False, True):
        answer = client.post("/v1/chat/completions", json=body | {"stream": streams})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, code or "invalid_argument")
        assert "--" not in error["message"]
    assert settled(client, llm)


def test_images_go_with_no_context_and_are_not_tokenized_alone(server, oracle):
    client, _ = server
    messages = conversations(oracle.images)[1]
    refused = client.post("/v1/chat/completions", json={"messages": messages, "context": "it", **GREEDY})
    assert refused.status_code == 404
    refused = client.post("/v1/contexts", json={"id": "it", "messages": messages})
    assert (refused.status_code, "holds text only" in refused.json()["error"]["message"]) == (400, True)
    refused = client.post("/tokenize", json={"messages": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_an_image_that_ranks_cannot_take_ends_its_request_alone(oracle, expected, tmp_path, monkeypatch):
    """The engine fails with it each time, and the request is known by that; everybody else is answered."""
    fault_file = tmp_path / "fault"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
    monkeypatch.setenv("FAULT_FILE", str(fault_file))
    body, text_of = {"messages": conversations(oracle.images)[0], **GREEDY}, {}
    with served(model=str(oracle.path), **SETTINGS) as (client, llm):
        plain = {"prompt": "w8 w9", **GREEDY}
        text_of["before"] = client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
        fault_file.write_text(json.dumps({"rank": 1, "point": "image", "action": "out of memory", "always": True}))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=body)))
        asking.start()
        asking.join(120)
        assert (answers[0].status_code, "failed 2 times" in answers[0].text) == (422, True)
        assert client.get("/health").json()["restarts"] == 2
        assert client.get("/health").json()["status"] == "ok"
        text_of["after"] = client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
        fault_file.unlink()
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == expected[0].text
        assert settled(client, llm)
    assert text_of["before"] == text_of["after"]


def test_requests_with_images_are_told_to_come_later_where_those_of_others_fill_the_room(server, oracle, monkeypatch):
    client, llm = server
    body = {"messages": conversations(oracle.images)[0], **GREEDY}
    with monkeypatch.context() as patch:
        patch.setattr(type(llm), "image_bytes", property(lambda llm: llm.config.image_bytes))
        refused = client.post("/v1/chat/completions", json=body)
        assert client.post("/v1/completions", json={"prompt": "w8 w9", **GREEDY}).status_code == 200
    assert (refused.status_code, "images of waiting requests" in refused.text) == (429, True)
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_models_of_text_refuse_them():
    with served(max_model_len=256) as (client, _):
        body = {"messages": [{"role": "user", "content": [part(draw(1, 1, 1)), text("Hi")]}], **GREEDY}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_model", "messages")
        assert "does not take images" in error["message"]
