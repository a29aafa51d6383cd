"""What answers have to be, and tools, over HTTP."""

import json
import re

import pytest
from test_serve import events, served

from longhelix.engine.text.chat_template import ChatTemplate
from tiers import few

pytestmark = pytest.mark.dist

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = {"prompt": "A person as JSON: ", "max_tokens": 200, "temperature": 0.7, "seed": 3}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 3},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
# As Qwen's templates show it.
TEMPLATE = """{% if tools %}{{ '<|im_start|>system\n<tools>\n' }}
{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{ '</tools>\nReply with <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"""


@pytest.fixture(scope="module")
def server():
    with served() as both:
        yield both


@pytest.fixture
def with_tools(server, monkeypatch):
    """The model with a template whose tools look different from those of its own template."""
    monkeypatch.setattr(server[1].tokenizer, "_chat_template", ChatTemplate(TEMPLATE, {}))
    return server


def check_person(text):
    found = json.loads(text)
    assert list(found) == ["name", "age"]
    assert 0 <= found["age"] <= 99
    assert len(found["name"]) <= 8


@pytest.mark.parametrize(
    "field",
    few(
        [
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
                }
            },
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
        ]
    ),
)
def test_answers_are_json_of_a_schema(server, field):
    client, _ = server
    answer = client.post("/v1/completions", json=ASKED | field | {"n": 3}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    for choice in answer["choices"]:
        check_person(choice["text"])
    chat = {name: value for name, value in ASKED.items() if name != "prompt"} | field
    chat["messages"] = [{"role": "user", "content": "Who are you?"}]
    whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    check_person(whole["message"]["content"])
    with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as got:
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(got))
    assert text == whole["message"]["content"]


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*\}"),
        pytest.param({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*\}", marks=pytest.mark.slow),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" | "(" root ")"'}, r"\(*x\)*"),
        ({"structured_outputs": {"grammar": 'start: "x" | "(" start ")"'}}, r"\(*x\)*"),
    ],
)
def test_answers_follow_other_guides(server, field, pattern):
    client, _ = server
    choice = client.post("/v1/completions", json=ASKED | field).json()["choices"][0]
    assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"])
    assert choice["text"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "several fields guide the answer"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "several fields"),
        ({"guided_regex": "a", "ignore_eos": True}, "leave out ignore_eos or the guide"),
        ({"guided_regex": "a(b"}, "unclosed group"),
        ({"guided_json": {"type": "strange"}}, "Invalid type: strange"),
        ({"guided_json": {"type": "integer", "multipleOf": 1_000_003}}, "takes too much time or memory"),
        ({"guided_grammar": "x" * 140_000}, "a guide has 140000 bytes"),
        ({"response_format": {"type": "json_schema"}}, "response_format needs json_schema if its type is json_schema"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not served here"),
    ],
)
def test_what_nothing_can_be_is_refused(server, field, words):
    client, _ = server
    for streams in (False, True):
        answer = client.post("/v1/completions", json=ASKED | field | {"stream": streams})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json=ASKED | {"guided_choice": ["fine"]}).status_code == 200


QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 150, "temperature": 0.5, "seed": 7}


def check_call(call):
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in (1, 2, 3)
    else:
        assert (call["function"]["name"], arguments) == ("now", {})


@pytest.mark.parametrize(
    "choice",
    few(
        [
            {"type": "function", "function": {"name": "now"}},
            "required",
            {"type": "function", "function": {"name": "get_weather"}},
        ]
    ),
)
def test_a_wanted_call_comes(with_tools, choice):
    """Whole and in a stream alike."""
    client, _ = with_tools
    body = CHAT | {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    check_call(call)
    if choice != "required":
        assert call["function"]["name"] == choice["function"]["name"]
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
        _, *come = events(got)
    deltas = [event["choices"][0]["delta"] for event in come]
    calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert not any(delta.get("content") for delta in deltas)
    assert {each["index"] for each in calls} == {0}
    assert [each["function"]["name"] for each in calls if "id" in each] == [call["function"]["name"]]
    assert "".join(each["function"]["arguments"] for each in calls) == call["function"]["arguments"]
    assert len(calls) > 2
    assert come[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_several_calls_may_come(with_tools):
    client, _ = with_tools
    bias = {"logit_bias": {str(token): -30 for token in with_tools[1].config.spec.vocabulary.eos_token_ids}}
    body = CHAT | {"tool_choice": "required", "max_tokens": 400} | bias
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert len(calls) > 1
    for call in calls[:-1]:
        check_call(call)
    assert choice["finish_reason"] in ("length", "tool_calls")


@pytest.mark.slow
def test_without_a_wanted_call_text_comes(with_tools):
    client, _ = with_tools
    none = client.post("/v1/chat/completions", json=CHAT | {"tool_choice": "none"}).json()
    plain = client.post("/v1/chat/completions", json={name: CHAT[name] for name in CHAT if name != "tools"}).json()
    auto = client.post("/v1/chat/completions", json=CHAT).json()
    assert none["choices"][0]["message"] == plain["choices"][0]["message"]
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] < auto["usage"]["prompt_tokens"]
    assert "tool_calls" not in none["choices"][0]["message"]


def test_calls_and_their_results_go_into_the_conversation(with_tools):
    client, llm = with_tools
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = llm.tokenizer.spell(ids)
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>' in text
    assert "<|im_start|>tool\nnoon" in text
    assert client.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": TOOLS[:1] * 2}, "two tools have the same name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice requires a call, but there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "which is not one of the tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "with space"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"response_format": {"type": "json_object"}}, "leave out tools, or the field that guides the answer"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
            },
            "Invalid type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of a call are not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            "the arguments of a call are not a JSON object",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_said(with_tools, change, words):
    client, _ = with_tools
    for streams in (False, True):
        answer = client.post("/v1/chat/completions", json=CHAT | change | {"stream": streams})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_a_template_without_tools_refuses_them(server, monkeypatch):
    client, llm = server
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "_chat_template", ChatTemplate(template, {}))
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert "the model's chat template does not support tools" in answer.json()["error"]["message"]


def test_the_built_in_models_own_template_shows_tools(server):
    client, llm = server
    with_tools = llm.tokenizer.encode_chat(CHAT["messages"], tools=CHAT["tools"])
    shown = llm.tokenizer.decode(with_tools)
    assert all(tool["function"]["name"] in shown for tool in CHAT["tools"])
    answer = client.post("/v1/chat/completions", json=CHAT | {"tool_choice": "required", "max_tokens": 200})
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert calls
    assert {call["function"]["name"] for call in calls} <= {tool["function"]["name"] for tool in CHAT["tools"]}
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
