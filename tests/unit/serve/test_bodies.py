"""What fields of bodies become."""

import pytest
from pydantic import ValidationError

from longhelix.errors import UserError
from longhelix.serve.bodies import (
    ChatBody,
    CompletionBody,
    ContextBody,
    DetokenizeBody,
    Message,
    ResponseBody,
    TokenizeBody,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        (5, [5, 6]),
        (-1, [2**63 - 1, 0]),
        (-(2**63), [0, 1]),
        (2**63 - 1, [2**63 - 1, 0]),
    ],
)
def test_any_64_bits_are_a_seed(given, seeds):
    """A choice beyond the first has the one after it."""
    body = CompletionBody(prompt="x", seed=given)
    assert [body.sampling(1, choice, None, None, {}).seed for choice in range(2)] == seeds


@pytest.mark.parametrize("given", [-(2**63) - 1, 2**63, 1.5])
def test_more_are_none(given):
    with pytest.raises(ValidationError):
        CompletionBody(prompt="x", seed=given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (CompletionBody, {"prompt": "x"}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
        (ResponseBody, {"input": "x"}),
    ],
)
def test_no_salt_has_a_context_loaded_again(kind, given):
    assert kind(**given, context="papers", cache_salt="").service().cache_salt == ""
    assert kind(**given, cache_salt="a").service().cache_salt == "a"
    with pytest.raises(ValidationError, match="cache_salt keeps KV private"):
        kind(**given, context="papers", cache_salt="a")


def test_a_developers_messages_are_the_systems_for_templates():
    told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (chat, _), (response, _) = ChatBody(messages=told).messages, ResponseBody(input=told).take_messages()
    brief = {"role": "system", "content": "Be brief."}
    assert chat.for_template("messages[0]") == response.for_template("input[0]") == brief
    assert Message(role="tool", content="x").for_template("messages[0]")["role"] == "tool"


def test_a_response_is_one():
    assert ResponseBody(input="x", n=1).choices == ResponseBody(input="x").choices == 1
    assert ResponseBody.model_json_schema()["properties"]["n"]["anyOf"][0]["maximum"] == 1
    for wrong in (2, 0, True, 1.0, "1"):
        with pytest.raises(ValidationError):
            ResponseBody(input="x", n=wrong)


MANY = {str(number): "no number" for number in range(100_000)}


@pytest.mark.parametrize(
    ("body", "fields", "most"),
    [
        (CompletionBody, {"prompt": "x", "logit_bias": MANY}, 1024),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "logit_bias": MANY}, 1024),
        (ResponseBody, {"input": "x", "metadata": dict.fromkeys(MANY, 1)}, 16),
        (CompletionBody, {"prompt": "x", "structured_outputs": MANY}, 13),
    ],
    ids=["logit_bias", "logit_bias of a chat", "metadata", "structured_outputs"],
)
def test_an_object_of_very_many_entries_is_wrong_once(body, fields, most):
    with pytest.raises(ValidationError) as refused:
        body.model_validate(fields)
    assert refused.value.error_count() == 1
    assert refused.value.errors()[0]["msg"].endswith(f"there are 100000 entries: give at most {most}")


def test_objects_of_as_many_entries_as_may_be_are_taken():
    biases = {str(number): 1.0 for number in range(1024)}
    assert CompletionBody(prompt="x", logit_bias=biases).logit_bias == biases
    metadata = {str(number): "x" for number in range(16)}
    assert ResponseBody(input="x", metadata=metadata).metadata == metadata


HALF = "half \ud83e a pair"


def chat(**fields):
    return ChatBody, {"messages": [{"role": "user", "content": "x"}]} | fields


def said(content, **fields):
    return chat(messages=[{"role": "user", "content": content} | fields])


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ResponseBody, {"input": HALF}),
        (ResponseBody, {"input": "x", "instructions": HALF}),
        (ResponseBody, {"input": [{"role": "user", "content": HALF}]}),
        (ResponseBody, {"input": [{"role": "user", "content": [{"type": "input_text", "text": HALF}]}]}),
        (ResponseBody, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": HALF}]}]}),
        (ResponseBody, {"input": "x", "metadata": {"x": HALF}}),
        (ResponseBody, {"input": "x", "metadata": {HALF: "x"}}),
        said(HALF),
        said([{"type": "text", "text": HALF}]),
        said([{"type": "image_url", "image_url": {"url": HALF}}]),
        said("x", role=HALF),
        said("x", tool_calls=[{"id": HALF, "function": {"name": "f", "arguments": "{}"}}]),
        said("x", tool_calls=[{"function": {"name": "f", "arguments": HALF}}]),
        chat(tools=[{"type": "function", "function": {"name": "f", "description": HALF}}]),
        chat(client=HALF),
        chat(cache_salt=HALF),
        chat(model=HALF),
        chat(stop=HALF),
        chat(guided_regex=HALF),
        chat(guided_grammar=HALF),
        chat(guided_choice=[HALF]),
        chat(structured_outputs={"regex": HALF}),
        chat(structured_outputs={"grammar": HALF}),
        chat(structured_outputs={"choice": [HALF]}),
        chat(response_format={"type": "json_schema", "json_schema": {"name": HALF, "schema": {}}}),
        (CompletionBody, {"prompt": HALF}),
        (ContextBody, {"id": HALF, "prompt": "x"}),
        (ContextBody, {"id": "x", "prompt": HALF}),
        (TokenizeBody, {"prompt": HALF}),
        (TokenizeBody, {"prompt": "x", "model": HALF}),
        (DetokenizeBody, {"tokens": [1], "model": HALF}),
    ],
    ids=ascii,
)
def test_half_a_surrogate_pair_is_no_text(body, fields):
    with pytest.raises(ValidationError) as refused:
        body.model_validate(fields)
    said = refused.value.errors()[0]["msg"]
    assert "half a surrogate pair at character 5" in said or "as a unicode string" in said


@pytest.mark.parametrize("unknown", [HALF, [HALF], {HALF: 1}, {"a": {"b": HALF}}], ids=ascii)
@pytest.mark.parametrize("place", [("text",), ("text", "format")])
def test_unknown_fields_that_an_answer_quotes_can_be_written(place, unknown):
    """They failed the answer: `text` is sent back with all that it has."""
    format = {"type": "json_object"} | ({"never_heard_of": unknown} if "format" in place else {})
    fields = {"input": "x", "text": {"format": format} | ({} if "format" in place else {"never_heard_of": unknown})}
    with pytest.raises(ValidationError, match="half a surrogate pair at character"):
        ResponseBody.model_validate(fields)


@pytest.mark.parametrize(
    "fields", [{"stop": [HALF]}, {"guided_json": HALF}, {"structured_outputs": {"json": HALF}}], ids=ascii
)
def test_nor_is_it_where_something_is_made_of_it(fields):
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    with pytest.raises(UserError, match="half a surrogate pair at character 5"):
        body.sampling(1, 0, None, body.guide(), {})


PARTS = [{"type": "text", "text": ""}] * 1024
CALLS = [{"function": {"name": "f", "arguments": "{}"}}] * 128


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": ""}] * 32_769, "there are 32769 messages: give at most 32768"),
        ([{"role": "user", "content": PARTS}] * 33, "33792 parts and tool calls in total: give at most 32768"),
        ([{"role": "assistant", "content": "", "tool_calls": CALLS}] * 257, "32896 parts and tool calls in total"),
        ([{"role": "user", "content": PARTS, "tool_calls": CALLS}] * 29, "33408 parts and tool calls in total"),
        ([None] * 32_769, "there are 32769 messages"),
    ],
    ids=["messages", "parts", "calls", "both", "nothing"],
)
def test_a_conversation_is_counted_before_it_is_looked_at(messages, words):
    for body, fields in (
        (ChatBody, {"messages": messages}),
        (ResponseBody, {"input": messages}),
        (TokenizeBody, {"messages": messages}),
        (ContextBody, {"id": "x", "messages": messages}),
    ):
        with pytest.raises(ValidationError) as refused:
            body.model_validate(fields)
        assert refused.value.error_count() == 1
        assert words in refused.value.errors()[0]["msg"]


def test_as_long_a_conversation_as_may_be_is_taken():
    assert len(ChatBody(messages=[{"role": "user", "content": ""}] * 32_768).messages) == 32_768
    assert len(ChatBody(messages=[{"role": "user", "content": PARTS}] * 32).messages) == 32
