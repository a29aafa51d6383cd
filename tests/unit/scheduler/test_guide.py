"""Guides: what is one, and what is refused in words."""

import json

import msgspec
import pytest

from longhelix import Guide, SamplingParams, UserError
from longhelix.scheduler.guide import LONGEST_GUIDE, MOST_STATES, MOST_STATES_BYTES, STATE_BYTES, KeptGuides

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json"),
        Guide.of_schema({"type": "array"}),
        Guide("json_schema", '{"type": "array"}'),
        Guide("regex", "é+"),
        Guide("grammar", 'start: "a"'),
        Guide.of_choices(["a", "b"]),
    ],
)
def test_guides_travel_and_are_keys(guide):
    params = SamplingParams(guide=guide)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert hash(params) == hash(SamplingParams(guide=Guide(guide.kind, guide.text)))
    assert params.needs_generated
    assert not SamplingParams().needs_generated


def test_a_schema_is_the_same_as_an_object_and_as_text():
    schema = {"type": "object", "properties": {"é": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}}
    assert Guide.of_schema(schema).lark == Guide.of_schema(json.dumps(schema)).lark
    assert json.loads(Guide.of_schema(schema).text) == schema


def test_no_schema_says_what_stands_between_tokens():
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": ".*", "whitespace_flexible": False}}
    assert Guide.of_schema(schema).lark == Guide("json").lark


def test_formats_that_nobody_enforces_are_passed_over():
    """JSON Schema has formats as notes. What only looks like one stays."""
    schema = {
        "properties": {
            "format": {"type": "string", "format": "path"},
            "const": {"type": ["integer", "string"], "format": "int64"},
            "day": {"type": "string", "format": "date"},
            "any": {"anyOf": [{"format": "binary"}, {"$ref": "#/$defs/format"}]},
            "data": {"const": {"format": "path"}},
            "wrong": {"format": 5},
        },
        "$defs": {"format": {"items": {"format": "uri-reference"}, "enum": [{"format": "path"}]}},
    }
    kept = {
        "properties": {
            "format": {"type": "string"},
            "const": {"type": ["integer", "string"]},
            "day": {"type": "string", "format": "date"},
            "any": {"anyOf": [{}, {"$ref": "#/$defs/format"}]},
            "data": {"const": {"format": "path"}},
            "wrong": {"format": 5},
        },
        "$defs": {"format": {"items": {}, "enum": [{"format": "path"}]}},
    }
    assert Guide.of_schema(schema).lark == Guide.of_schema(kept).lark
    assert '"path"' in Guide.of_schema(schema).lark
    assert '"int64"' not in Guide.of_schema(schema).lark


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Guide("xml"), "the kind of a guide 'xml' is not known: use one of json, json_schema, regex"),
        (lambda: Guide(None), "the kind of a guide None is not known"),
        (lambda: Guide("regex", 5), "a guide is 5: set it to a string"),
        (lambda: Guide("regex", "\ud800"), "half a surrogate pair at character 0"),
        (lambda: Guide("regex", "é" * (LONGEST_GUIDE // 2 + 1)), "a guide has 131074 bytes: give at most 131072"),
        (lambda: Guide("json", "{}"), "a guide of kind json takes no text"),
        (lambda: Guide("regex"), "a guide of kind regex is empty: give a regex"),
        (lambda: Guide("json_schema"), "a JSON schema is not JSON"),
        (lambda: Guide("json_schema", "[" * 100_000), "a JSON schema is not JSON"),
        (lambda: Guide("json_schema", "true"), "a JSON schema is not an object"),
        (lambda: Guide("json_schema", '{"items":' * 65 + "{}" + "}" * 65), "nested deeper than 64 levels"),
        (lambda: Guide.of_schema({"a": object()}), "a JSON schema cannot be written as JSON"),
        (lambda: Guide.of_schema(5), "a JSON schema is not an object"),
        (lambda: Guide("choice", '{"a": 1}'), "choices is not a list of strings"),
        (lambda: Guide("choice", "[]"), "choices is not a list of strings"),
        (lambda: Guide("choice", '["a", ""]'), "choices is not a list of strings"),
        (lambda: Guide("choice", '["a", 5]'), "choices is not a list of strings"),
        (lambda: Guide("choice", json.dumps(["a"] * 10_001)), "there are 10001 choices: give at most 10000"),
        (lambda: Guide.of_choices("ab"), "choices is the string 'ab': give a tuple of strings"),
        (lambda: SamplingParams(guide="json"), "guide is 'json': set it to a Guide"),
        (lambda: SamplingParams(guide=Guide("json"), ignore_eos=True), "leave out ignore_eos or the guide"),
    ],
)
def test_what_is_none_is_refused_in_words(make, words):
    with pytest.raises(UserError) as refused:
        make()
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


def guide_of(characters, name):
    return Guide("regex", name * characters)


def test_of_long_guides_fewer_are_kept():
    """The text of sixteen of the longest has 2 Mi characters."""
    kept, longest = KeptGuides(), [guide_of(LONGEST_GUIDE, chr(ord("a") + number)) for number in range(16)]
    for guide in longest:
        assert kept.want(guide, lambda guide: guide.text[0]) == guide.text[0]
    assert all(guide in kept for guide in longest)
    assert kept.want(longest[0], lambda guide: "made again") == "a"
    kept.want(Guide("regex", "short"), lambda guide: "")
    assert all(guide in kept for guide in longest)
    kept.trim()
    assert [guide in kept for guide in longest] == [True, False] + [True] * 14
    kept.forget(longest[2])
    kept.forget(longest[2])  # which it has not any more
    kept.want(guide_of(LONGEST_GUIDE - 5, "z"), lambda guide: "")
    kept.trim()
    assert longest[0] in kept
    assert longest[3] in kept
    assert sum(guide in kept for guide in longest) == 14


def test_what_cannot_be_made_is_not_kept():
    def refuse(guide):
        raise UserError("no grammar")

    kept, longest = KeptGuides(), guide_of(LONGEST_GUIDE, "a")
    for _ in range(20):
        with pytest.raises(UserError, match="no grammar"):
            kept.want(longest, refuse)
    assert longest not in kept
    kept.want(longest, lambda guide: "")
    kept.want(guide_of(LONGEST_GUIDE, "b"), lambda guide: "")
    kept.trim()
    assert longest in kept


def test_what_is_kept_is_bounded_by_memory():
    """A text that follows a guide may add as many states to its automaton as it can have, whatever its characters."""
    kept, guides = KeptGuides(), [Guide("regex", f"[ab]*a[ab]{{{count}}}") for count in range(256)]
    for guide in guides:
        kept.want(guide, str)
    kept.trim()
    assert all(guide in kept for guide in guides), "nothing has followed them yet"
    for guide in guides:
        kept.follow(guide)
    kept.trim()
    left = [guide for guide in guides if guide in kept]
    assert left == guides[-len(left) :], "those that were wanted last"
    assert 20 <= len(left) <= MOST_STATES_BYTES / (MOST_STATES * STATE_BYTES)


def test_choices_have_few_states():
    kept, guides = KeptGuides(), [Guide.of_choices(["yes", f"no {count}"]) for count in range(256)]
    for guide in guides:
        kept.want(guide, str)
        kept.follow(guide)
        kept.follow(guide)
    kept.trim()
    assert all(guide in kept for guide in guides)


def test_one_that_is_forgotten_and_wanted_again_begins_anew():
    kept, guide = KeptGuides(), Guide("regex", "a+")
    for _ in range(100):
        kept.want(guide, str)
        kept.follow(guide)
        kept.forget(guide)
        kept.follow(guide)
    others = [Guide("regex", f"b{{{count}}}") for count in range(255)]
    for other in [guide, *others]:
        kept.want(other, str)
    kept.trim()
    assert guide in kept
