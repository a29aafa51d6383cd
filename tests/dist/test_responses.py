"""OpenAI's newer interface, by its own client: whole answers, typed events, what is refused."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from served import served

pytestmark = pytest.mark.dist

QUESTION = "Count to five."
GREEDY = {"model": "small", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def server():
    with served() as both:
        yield both


@pytest.fixture(scope="module")
def api(server):
    client, _ = server
    url = str(client.base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def chat(client, messages, **more):
    body = {"messages": messages, "temperature": 0, "max_tokens": 12} | more
    return client.post("/v1/chat/completions", json=body).json()


def test_an_answer_is_that_of_a_chat(server, api):
    client, _ = server
    same = chat(client, [{"role": "user", "content": QUESTION}])
    for given in (
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ):
        answer = api.responses.create(input=given, **GREEDY)
        Response.model_validate(answer.model_dump(), strict=False)
        assert answer.output_text == same["choices"][0]["message"]["content"]
        assert (answer.object, answer.model, answer.store) == ("response", "small", False)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        usage = same["usage"]
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert answer.usage.total_tokens == usage["total_tokens"]


@pytest.mark.slow
def test_instructions_and_what_was_answered_before_come_first(server, api):
    client, _ = server
    first = api.responses.create(input=QUESTION, instructions="Be brief.", **GREEDY)
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert first.output_text == chat(client, before)["choices"][0]["message"]["content"]
    more = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And to six?"}]
    second = api.responses.create(input=more, instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
    whole = [*before, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And to six?"}]
    assert second.output_text == chat(client, whole)["choices"][0]["message"]["content"]
    assert (second.instructions, second.metadata) == ("Be brief.", {"a": "b"})
    told = api.responses.create(
        input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}], **GREEDY
    )
    assert told.output_text == first.output_text


def test_events_are_those_that_its_client_knows(server, api):
    whole = api.responses.create(input=QUESTION, **GREEDY)
    events = list(api.responses.create(input=QUESTION, stream=True, **GREEDY))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert len({event.response.id for event in (events[0], events[1], events[-1])}) == 1
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id} == {events[-2].item.id}


def test_one_that_ends_by_itself_is_completed(server, api):
    """At a stop string, that is."""
    text = api.responses.create(input=QUESTION, **GREEDY).output_text
    stop = {"extra_body": {"stop": text[5:8]}}
    answer = api.responses.create(input=QUESTION, **stop, **GREEDY)
    assert (answer.status, answer.incomplete_details, answer.output[0].status) == ("completed", None, "completed")
    assert answer.output_text == text[: text.index(text[5:8])]
    *_, last = api.responses.create(input=QUESTION, stream=True, **stop, **GREEDY)
    assert (last.type, last.response.output_text) == ("response.completed", answer.output_text)
    with api.responses.stream(input=QUESTION, **stop, **GREEDY) as stream:
        assert stream.get_final_response().output_text == answer.output_text


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "name": "answer", "schema": {"type": "boolean"}, "strict": True},
        {"type": "json_object"},
    ],
)
def test_the_format_of_the_text_is_followed(server, api, form):
    client, _ = server
    answer = api.responses.create(input=QUESTION, text={"format": form}, max_output_tokens=64)
    assert answer.output_text.startswith(("true", "false") if form["type"] == "json_schema" else "{")
    assert answer.text.format.type == form["type"]
    both = {"input": QUESTION, "text": {"format": form}, "guided_regex": "a"}
    refused = client.post("/v1/responses", json=both).json()["error"]
    assert "several fields guide the answer: give only one of text," in refused["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("tools", [{"type": "web_search"}]),
        ("text", {"format": {"type": "xml"}}),
        ("text", {"format": {"type": "json_schema", "name": "person"}}),
        ("text", {"format": {"type": "json_schema", "name": "person", "schema": {"type": "strange"}}}),
        ("truncation", "auto"),
        ("include", ["message.output_text.logprobs"]),
        ("input", []),
        ("input", [{"type": "function_call_output", "call_id": "a", "output": "b"}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]),
        ("max_output_tokens", 0),
        ("max_output_tokens", 2040),
        ("temperature", -1),
        ("metadata", {"a": 1}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_not_served_is_said(api, field, value, streams):
    with pytest.raises(openai.BadRequestError) as refusal:
        api.responses.create(**{"input": QUESTION, "stream": streams} | GREEDY | {field: value})
    assert refusal.value.param == field
    assert refusal.value.code
    if field in ("store", "previous_response_id", "conversation"):
        assert "responses are not stored" in refusal.value.message


def test_an_answer_that_fails_after_its_stream_began_says_so(server, monkeypatch):
    client, _ = server

    def fail(live, event, now_s):
        raise ArithmeticError("of this request alone")

    monkeypatch.setattr("longhelix.engine.live.Live.take", fail)
    with client.stream("POST", "/v1/responses", json={"input": QUESTION, "stream": True, **GREEDY}) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines[-2] == "event: response.failed"
    failed = json.loads(lines[-1].removeprefix("data: "))["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "request_failed")
    assert "ArithmeticError" in failed["error"]["message"]
    monkeypatch.undo()
    assert client.post("/v1/responses", json={"input": QUESTION, **GREEDY}).status_code == 200


def test_chats_and_completions_are_what_its_client_knows(server, api):
    client, _ = server
    same = chat(client, [{"role": "user", "content": QUESTION}])
    answer = api.chat.completions.create(
        model="small", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_completion_tokens=12
    )
    assert answer.choices[0].message.content == same["choices"][0]["message"]["content"]
    stream = api.completions.create(model="small", prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in stream)
    with pytest.raises(openai.NotFoundError) as refusal:
        api.completions.create(model="other", prompt="x")
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
