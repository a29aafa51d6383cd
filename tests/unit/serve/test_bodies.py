"""What fields of bodies become."""

import pytest
from pydantic import ValidationError

from longhelix.serve.bodies import ChatBody, CompletionBody, Message, ResponseBody

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
    assert [body.sampling(1, choice, None, None).seed for choice in range(2)] == seeds


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
    with pytest.raises(ValidationError, match="cache_salt is for KV that is not shared"):
        kind(**given, context="papers", cache_salt="a")


def test_a_developers_messages_are_the_systems_for_templates():
    told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (chat, _), (response, _) = ChatBody(messages=told).messages, ResponseBody(input=told).take_messages()
    assert chat.for_template() == response.for_template() == {"role": "system", "content": "Be brief."}
    assert Message(role="tool", content="x").for_template()["role"] == "tool"


def test_a_response_is_one():
    assert ResponseBody(input="x", n=1).choices == ResponseBody(input="x").choices == 1
    assert ResponseBody.model_json_schema()["properties"]["n"]["anyOf"][0]["maximum"] == 1
    for wrong in (2, 0, True, 1.0, "1"):
        with pytest.raises(ValidationError):
            ResponseBody(input="x", n=wrong)
