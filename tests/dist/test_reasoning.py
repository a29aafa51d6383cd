"""Reasoning apart from the answer, over HTTP: a toy model with Qwen3's template and tags, and scripted texts."""

import json
import re

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from served import events, served
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from longhelix import Layout
from oracle import make_oracle

pytestmark = pytest.mark.dist

START, EOS, THINK, CLOSE = range(256, 260)
CONFIG = LlamaConfig(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64, intermediate_size=64, vocab_size=260,
    num_hidden_layers=1, max_position_embeddings=4096, initializer_range=0.25, bos_token_id=None, eos_token_id=EOS,
    pad_token_id=None,
)  # fmt: skip
# As Qwen3's, which opens no tag, and leaves reasoning out by an empty block; and as R1's, which opens one.
TEMPLATE = """{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{ '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}{% endif %}
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{ message.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if '/open' in messages[-1].content %}{{ '<think>\n' }}
{%- elif '/no_think' in messages[-1].content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def server(request, tmp_path_factory):
    """Tags are tokens that texts show, as those of Qwen3 and R1, or special ones that they leave out."""
    folder = make_oracle(CONFIG, tmp_path_factory.mktemp("reasons"), prompt_lengths=(1,), new_tokens=1).path
    vocab = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for token in ("<|im_start|>", "<|im_end|>"):
        backend.add_tokens([AddedToken(token, special=True, normalized=False)])
    for token in ("<think>", "</think>"):
        backend.add_tokens([AddedToken(token, special=request.param, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"kv_cache_tokens": 8192, "max_model_len": 2048, "dtype": "float32", "prefix_cache": False}
    with served(model=str(folder), layout=Layout(kvp=2), **settings) as both:
        yield both


class Script:
    """Says the same text whatever tokens come, a piece for each."""

    def __init__(self, pieces):
        self._pieces = iter(pieces)

    def push(self, token_id):
        return next(self._pieces, "")

    def finish(self):
        return ""


@pytest.fixture
def say(server, monkeypatch):
    """Has each answer say some pieces, up to "§", which ends it, or as many as it has tokens."""

    def script(pieces):
        monkeypatch.setattr(server[1].tokenizer, "stream", lambda *_: Script(pieces))
        no_tags = {"logit_bias": {str(THINK): -100, str(CLOSE): -100}}
        return {"max_tokens": len(pieces), "stop": ["§"], "ignore_eos": True} | no_tags

    return script


def asked(words, **more):
    return {"messages": [{"role": "user", "content": words}]} | more


def chat(client, body):
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client, body):
    """The deltas of each choice, and the usage."""
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
        come = events(got)
    usage = come.pop()["usage"] if "stream_options" in body else None
    choices = {}
    for event in come:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices, usage


def joined(choices, field):
    return "".join(choice["delta"].get(field) or "" for choice in choices)


CASES = [
    ("Hi", ["<think>", "\n", "Why", "?\n", "</think>", "\n\n", "Yes", ".", "§"], "Why?", "Yes.", 5),
    ("Hi", ["<th", "ink>\nWhy", "?", "</", "think", ">\n", "Yes.", "§"], "Why?", "Yes.", 6),
    ("Hi", ["<think>", "\n\n", "</think>", "\n\n", "Yes", "§"], None, "Yes", 3),
    ("Hi", ["Yes ", "<think>", "no", "§"], None, "Yes <think>no", 0),
    ("Hi", ["<think>", "Wh", "y"], "Why", None, 3),
    ("Hi", ["<think>", "Wh", "§", "y"], "Wh", None, 3),
    ("Hi /open", ["Why", "?\n", "</think>", "\n\nYes", "§"], "Why?", "Yes", 3),
    ("Hi /open", ["Why", "?"], "Why?", None, 2),
    ("Hi /open", ["</think>", "Yes", "§"], None, "Yes", 1),
    ("Hi /no_think", ["Yes", "§"], None, "Yes", None),
]


@pytest.mark.parametrize(("words", "pieces", "reasoning", "content", "count"), CASES)
def test_reasoning_is_no_part_of_the_content(server, say, words, pieces, reasoning, content, count):
    """Whole and in a stream, in each of several choices, with a log-probability for each token."""
    client, _ = server
    body = asked(words, n=2, logprobs=True, return_token_ids=True, **say(pieces))
    answer = chat(client, body)
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (reasoning, content)
        assert message["reasoning"] == reasoning
        assert choice["finish_reason"] == ("stop" if "§" in pieces else "length")
        tokens = pieces.index("§") + 1 if "§" in pieces else len(pieces)
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == tokens
    details = answer["usage"]["completion_tokens_details"]
    assert details == (None if count is None else {"reasoning_tokens": 2 * count})
    choices, usage = streamed(client, body | {"stream_options": {"include_usage": True}})
    assert usage == answer["usage"]
    for choice in answer["choices"]:
        come = choices[choice["index"]]
        assert joined(come, "reasoning_content") == joined(come, "reasoning") == (reasoning or "")
        assert joined(come, "content") == (content or "")
        assert come[-1]["finish_reason"] == choice["finish_reason"]
        found = [each for one in come if one["logprobs"] for each in one["logprobs"]["content"]]
        assert len(found) == len(choice["logprobs"]["content"])


def test_reasoning_streams_as_it_comes(server, say):
    client, _ = server
    choices, _ = streamed(client, asked("Hi /open", **say(["a", "b", "</think>", "\n\n", "c", "d", "§"])))
    deltas = [{name: text for name, text in one["delta"].items() if text} for one in choices[0]]
    assert [delta for delta in deltas if delta and "role" not in delta] == [
        {"reasoning_content": "a", "reasoning": "a"},
        {"reasoning_content": "b", "reasoning": "b"},
        {"content": "c"},
        {"content": "d"},
    ]


def test_reasoning_may_be_left_out_or_left_in(server, say):
    client, _ = server
    body = asked("Hi", **say(["<think>", "Why?", "</think>", "Yes", "§"]))
    without = chat(client, body | {"include_reasoning": False})
    message = without["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Yes")
    assert without["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    choices, _ = streamed(client, body | {"include_reasoning": False})
    assert (joined(choices[0], "reasoning_content"), joined(choices[0], "content")) == ("", "Yes")
    inside = chat(client, body | {"separate_reasoning": False})
    message = inside["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "<think>Why?</think>Yes")
    assert inside["usage"]["completion_tokens_details"] is None
    completion = client.post("/v1/completions", json={"prompt": "Hi"} | say(["<think>", "Why?", "§"])).json()
    assert completion["choices"][0]["text"] == "<think>Why?"


def test_calls_come_behind_reasoning(server, say):
    """What looks like a call inside of it is none."""
    client, _ = server
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    body = asked("Hi", tools=TOOLS, **say(["<think>", call, "</think>", "\n\n", call, "§"]))
    choice = chat(client, body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == call
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["look"]
    choices, _ = streamed(client, body)
    assert joined(choices[0], "reasoning_content") == call
    calls = [each for one in choices[0] for each in one["delta"].get("tool_calls", [])]
    assert "".join(each["function"]["arguments"] for each in calls) == "{}"
    assert joined(choices[0], "content") == ""


@pytest.fixture
def api(server):
    url = str(server[0].base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def response_body(words, script):
    script = dict(script)
    most = script.pop("max_tokens")
    return {"model": "small", "input": words, "max_output_tokens": most, "extra_body": script}


@pytest.mark.parametrize(("words", "pieces", "reasoning", "content", "count"), CASES)
def test_responses_have_reasoning_items(api, say, words, pieces, reasoning, content, count):
    body = response_body(words, say(pieces))
    answer = api.responses.create(**body)
    Response.model_validate(answer.model_dump(), strict=False)
    kinds = ["reasoning"] * bool(reasoning) + ["message"] * bool(content)
    assert [item.type for item in answer.output] == kinds
    assert answer.output_text == (content or "")
    if reasoning:
        assert [part.text for part in answer.output[0].content] == [reasoning]
        assert answer.output[0].id.startswith("rs_")
    assert answer.usage.output_tokens_details.reasoning_tokens == (count or 0)
    last = "completed" if "§" in pieces else "incomplete"
    assert [item.status for item in answer.output] == ["completed"] * (len(kinds) - 1) + [last]
    come = list(api.responses.create(stream=True, **body))
    for event in come:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
    of_items = []
    for kind in kinds:
        text = "reasoning_text" if kind == "reasoning" else "output_text"
        of_items += ["output_item.added", "content_part.added", f"{text}.delta", f"{text}.done"]
        of_items += ["content_part.done", "output_item.done"]
    found = [event.type.removeprefix("response.") for event in come]
    assert [kind for kind, before in zip(found, [None, *found], strict=False) if kind != before] == [
        "created", "in_progress", *of_items, last,
    ]  # fmt: skip
    assert [event.sequence_number for event in come] == list(range(len(come)))
    deltas = "".join(event.delta for event in come if event.type == "response.reasoning_text.delta")
    assert deltas == (reasoning or "")
    ended = come[-1].response
    assert [item.model_dump(exclude={"id"}) for item in ended.output] == [
        item.model_dump(exclude={"id"}) for item in answer.output
    ]
    added = [(event.output_index, event.item.id) for event in come if event.type == "response.output_item.added"]
    assert added == list(enumerate(item.id for item in ended.output))


def test_reasoning_goes_back_into_the_conversation(server, api, say, monkeypatch):
    client, llm = server
    body = response_body("Hi", say(["<think>", "Why?", "</think>", "Yes", "§"]))
    first = api.responses.create(**body)
    shown = []
    encode = llm.tokenizer.encode_chat
    monkeypatch.setattr(
        llm.tokenizer, "encode_chat", lambda told, *more, **all: shown.append(told) or encode(told, *more, **all)
    )
    more = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
    api.responses.create(**body | {"input": more})
    before = {"role": "assistant", "content": "Yes", "reasoning_content": "Why?"}
    assert [message["role"] for message in shown[0]] == ["user", "assistant", "user"]
    assert {name: shown[0][1][name] for name in before} == before
    messages = [{"role": "user", "content": "Hi"}, before, {"role": "user", "content": "And?"}]
    ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert "<think>\nWhy?\n</think>\n\nYes<|im_end|>" in llm.tokenizer.spell(ids).replace("\n\n\n", "\n\n")


FREE = {"max_tokens": 400, "temperature": 1.0, "seed": 5, "logit_bias": {str(CLOSE): 8, str(THINK): 12}}


@pytest.mark.parametrize("words", ["Hi", "Hi /open", "Hi /no_think"])
def test_a_guide_is_of_the_content(server, words):
    """Which the reasoning comes before, where the model is to reason, in each choice and in a stream."""
    client, _ = server
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = asked(words, n=8, response_format=schema, **FREE)
    answer = chat(client, body)
    details = answer["usage"]["completion_tokens_details"]
    assert (details is None) if "no_think" in words else (details["reasoning_tokens"] > 0)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        assert found["n"] in (1, 22)
        assert found["ok"] in (True, False)
    choices, _ = streamed(client, body)
    for choice in answer["choices"]:
        come = choices[choice["index"]]
        assert joined(come, "content") == choice["message"]["content"]
        assert joined(come, "reasoning_content") == (choice["message"]["reasoning_content"] or "")


def test_a_guide_is_of_all_where_reasoning_stays_in_the_content(server):
    client, _ = server
    body = asked("Hi /open", guided_regex="[ab]{3}", separate_reasoning=False, **FREE)
    assert re.fullmatch("[ab]{3}", chat(client, body)["choices"][0]["message"]["content"])
    cut = chat(client, asked("Hi /open", guided_choice=["yes"], **FREE | {"max_tokens": 3, "logit_bias": {}}))
    message = cut["choices"][0]["message"]
    assert (message["content"], cut["choices"][0]["finish_reason"]) == (None, "length")
    assert message["reasoning_content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_wanted_call_comes_behind_reasoning(server, choice):
    client, _ = server
    for words in ("Hi", "Hi /open"):
        body = asked(words, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **FREE)
        answer = chat(client, body)
        found = answer["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in (["now"] if choice != "required" else ["now", "look"])
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0 or words == "Hi"


def test_reasoning_tokens_are_counted_for_prometheus(server, say):
    client, _ = server

    def counted():
        text = client.get("/metrics").text
        return float(re.search(r"^longhelix:reasoning_tokens_total\{.*\} (.*)$", text, re.MULTILINE)[1])

    before = counted()
    chat(client, asked("Hi", **say(["<think>", "Why?", "</think>", "Yes", "§"])))
    assert counted() == before + 3


@pytest.mark.parametrize("field", ["include_reasoning", "separate_reasoning"])
def test_what_is_no_choice_about_reasoning_is_refused(server, field):
    client, _ = server
    answer = client.post("/v1/chat/completions", json=asked("Hi") | {field: "yes"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
