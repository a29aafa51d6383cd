"""Messages as clients keep them and send them again, and where in them something is wrong."""

import re

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from longhelix.errors import UserError
from longhelix.serve.bodies import ChatBody, CompletionBody, Message, ResponseBody, TokenizeBody
from longhelix.serve.errors import _first, response_for

pytestmark = pytest.mark.unit


def templated(**fields):
    return Message(**({"role": "assistant"} | fields)).for_template("messages[0]")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("{}", {}),
        ({}, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_calls_without_arguments_have_none(given, wanted):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}]
    (call,) = templated(content=None, tool_calls=calls)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": wanted}


def test_arguments_may_be_left_out():
    (call,) = templated(tool_calls=[{"function": {"name": "f"}}])["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("given", "words"), [("{", "are not JSON"), ("[]", "are not a JSON object"), ("null", "not a")]
)
def test_other_arguments_are_refused_where_they_are(given, words):
    good, wrong = ({"function": {"name": "f", "arguments": each}} for each in ("", given))
    with pytest.raises(UserError, match=words) as refusal:
        Message(role="assistant", tool_calls=[good, wrong]).for_template("messages[3]")
    assert str(refusal.value).startswith("messages[3].tool_calls[1].function.arguments: ")
    assert b'"param":"messages"' in response_for(refusal.value).body


@pytest.mark.parametrize("field", ["content", "refusal", "reasoning", "reasoning_content"])
def test_all_that_a_message_says_counts_as_its_length(field):
    """Long conversations are tokenized one at a time."""
    assert Message(role="assistant", **{field: "12345"}).num_characters == 5


def test_refusals_stay_what_was_said():
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I cannot."}]
    assert templated(content=parts) == {"role": "assistant", "content": "No. I cannot."}
    assert templated(content=None, refusal="I cannot.") == {"role": "assistant", "content": "I cannot."}
    assert templated(content="Yes.", refusal=None) == {"role": "assistant", "content": "Yes."}
    (message,) = ResponseBody(input=[{"role": "assistant", "content": parts[1:]}]).take_messages()
    assert message.for_template("input[0]")["content"] == "I cannot."


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_to_templates_by_each_of_its_names(name):
    found = templated(content="4", **{name: "2 + 2"})
    assert {each: found[each] for each in ("reasoning_content", "reasoning", "thinking")} == dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"), "2 + 2"
    )
    assert templated(content="4", **{name: None}) == {"role": "assistant", "content": "4"}


def test_what_sdks_send_back_of_an_answer_is_taken():
    """openai's `message.model_dump()`."""
    found = templated(
        content="4", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None, reasoning=None
    )
    assert (found["role"], found["content"]) == ("assistant", "4")


IMAGE = "data:image/jpg;base64,AAAA"


@pytest.mark.parametrize("detail", [None, "auto", "low", "high", "original"])
def test_images_come_with_their_detail(detail):
    (message,) = ChatBody(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE, "detail": detail}}]}]
    ).messages
    assert message.image_urls == [IMAGE]
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": detail}]}]
    assert ResponseBody(input=given).take_messages()[0].image_urls == [IMAGE]


def test_an_image_may_be_its_url_alone():
    assert Message(role="user", content=[{"type": "image_url", "image_url": IMAGE}]).image_urls == [IMAGE]


def user(*content):
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": list(content)}]}


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "given", "path"),
    [
        (ChatBody, user({"type": "text", "text": 5}), "messages[1].content[0].text"),
        (ChatBody, user({"type": "text"}), "messages[1].content[0].text"),
        (ChatBody, user({"type": "text", "text": "x"}, 7), "messages[1].content[1]"),
        (ChatBody, user({"type": "smell"}), "messages[1].content[0]"),
        (ChatBody, user({"type": "refusal", "refusal": []}), "messages[1].content[0].refusal"),
        (ChatBody, user({"type": "image_url", "image_url": {}}), "messages[1].content[0].image_url.url"),
        (ChatBody, user({"type": "image_url", "image_url": {"url": 5}}), "messages[1].content[0].image_url.url"),
        (ChatBody, user({"type": "image_url"}), "messages[1].content[0].image_url"),
        (ChatBody, {"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (ChatBody, {"messages": [5]}, "messages[0]"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {}, "messages"),
        (ChatBody, user() | {"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        (ChatBody, user() | {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (ChatBody, user() | {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (ChatBody, user() | {"stop": ["x", 5]}, "stop[1]"),
        (ChatBody, user() | {"logit_bias": {"5": "x"}}, "logit_bias.5"),
        (ChatBody, user() | {"stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        (ChatBody, user() | {"response_format": {"type": "json_schema", "json_schema": {}}},
         "response_format.json_schema.schema"),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": "x"}}, "structured_outputs.choice"),
        (CompletionBody, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (ResponseBody, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (ResponseBody, {"input": 5}, "input"),
        (ResponseBody, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        (ResponseBody, {"input": "x", "metadata": {"a": 5}}, "metadata.a"),
        (TokenizeBody, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_the_path_that_its_client_wrote(body, given, path):
    with pytest.raises(ValidationError) as refusal:
        body.model_validate(given)
    found = [error | {"loc": ("body", *error["loc"])} for error in refusal.value.errors()]
    message, _, param = _first(RequestValidationError(found, body=given))
    assert param == re.match("[a-z_]+", path).group()
    assert message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"] * 5000, "stop: List should have at most"),
        ("a" * 1001, "stop: String should have at most 1000 characters"),
        (["a", 5], "stop[1]: Input should be a valid string"),
        ("", "stop: String should have at least 1 character"),
        (5, "stop: Input should be a valid string"),
    ],
)
def test_a_field_of_several_forms_is_refused_for_the_one_that_was_meant(given, words):
    with pytest.raises(ValidationError) as refusal:
        CompletionBody.model_validate(body := {"prompt": "x", "stop": given})
    found = [error | {"loc": ("body", *error["loc"])} for error in refusal.value.errors()]
    assert _first(RequestValidationError(found, body=body))[0].startswith(words)
