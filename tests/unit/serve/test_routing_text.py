"""The texts by which routers recognise prompts: requests with the same beginning have texts with the same beginning."""

import itertools
import json

import pytest

from longhelix.serve.routing_text import routing_text

pytestmark = pytest.mark.unit


def text(**body):
    return routing_text("POST", "/v1/completions", json.dumps(body).encode())


def shared(first, second):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


USER = {"role": "user", "content": "Where do whales sleep?"}
ANSWER = {"role": "assistant", "content": "In the sea."}
MORE = {"role": "user", "content": [{"type": "text", "text": "And how?"}]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"prompt": "Whales sleep"}, {"prompt": "Whales sleep in the sea"}),
        ({"prompt": [1, 22, 3]}, {"prompt": [1, 22, 3, 4]}),
        ({"messages": [USER]}, {"messages": [USER, ANSWER, MORE]}),
        ({"input": "Whales", "instructions": "Be brief"}, {"input": "Whales sleep", "instructions": "Be brief"}),
        ({"input": [USER]}, {"input": [USER, ANSWER]}),
    ],
)
def test_a_longer_prompt_continues_the_text_of_a_shorter_one(before, after):
    short, long = text(**before), text(**after)
    assert short
    assert long.startswith(short)
    assert long != short


def test_options_that_do_not_change_the_prompt_do_not_change_its_text():
    assert text(prompt="Whales", seed=1, temperature=0.5, model="m") == text(model="other", prompt="Whales")


@pytest.mark.parametrize("field", ["cache_salt", "tools"])
def test_what_comes_before_the_prompt_begins_the_text(field):
    first, second = (text(**{field: value}, prompt="Whales") for value in ("red", "blue"))
    assert shared(first, second) == 0


def test_token_ids_are_not_run_together():
    assert text(prompt=[1, 23]) != text(prompt=[12, 3])


def test_prompts_of_other_conversations_share_nothing():
    assert shared(text(messages=[USER]), text(messages=[ANSWER])) == 0


def test_long_prompts_are_cut():
    assert text(prompt="x" * 100_000) == "x" * 65_536
    assert len(text(prompt=[7] * 1_000_000)) == 65_536


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b"3", b"[" * 9999, b'{"text": "x"}', b'{"prompt": null}'])
def test_other_bodies_have_no_text(body):
    assert routing_text("POST", "/v1/completions", body) == ""


def test_requests_about_a_saved_context_have_its_name():
    found = {
        text(context="whales", prompt="Where do they sleep?"),
        text(context="whales", messages=[USER]),
        routing_text("POST", "/v1/contexts", b'{"id": "whales", "prompt": "Whales sleep in the sea"}'),
        routing_text("GET", "/v1/contexts/whales", b""),
        routing_text("DELETE", "/v1/contexts/whales", b""),
    }
    assert len(found) == 1
    assert shared(*found, text(context="whale", prompt="Where do they sleep?")) < 6  # under 10% of 64 characters
    assert routing_text("GET", "/v1/contexts", b"") == ""
