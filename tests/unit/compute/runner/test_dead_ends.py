"""Guides from which a text cannot end are found before any text follows them."""

import json
import random

import numpy as np
import pytest

from longhelix.compute.runner import dead_ends
from longhelix.compute.runner.dead_ends import DeadEnds
from longhelix.compute.runner.matchers import GuideError, Matchers
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, TokenTable

pytestmark = pytest.mark.unit

TABLE = TokenTable((*(bytes([byte]) for byte in range(256)), b"<e>"), (256,), (256,))
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
LIKELY = {*b'"{}[]:,ab01', 256}
ITSELF = {"$ref": "#/$defs/a"}
WITH_ITSELF = {"type": "object", "properties": {"x": ITSELF}, "required": ["x"]}


def closed(patterns, *names, **more):
    return {
        "type": "object",
        "properties": dict.fromkeys(names, INTEGER),
        "patternProperties": dict.fromkeys(patterns, INTEGER),
        "additionalProperties": False,
    } | more


DEAD = {
    "one": closed(["^a$"], "a"),
    "required": closed(["^a$"], "a", required=["a"]),
    "several": closed(["^[a-f]$"], *"abcdef"),
    "some of them required": closed(["^[ab]$"], "a", "b", required=["b"]),
    "two patterns": closed(["^a$", "^b$"], "a", "b"),
    "a pattern that nothing matches": closed([r"^[^\s\S]$"], "a"),
    "quoted": closed(['^q"é$'], 'q"é'),
    "inside": {"type": "object", "properties": {"o": closed(["^a$"], "a")}, "required": ["o"]},
    "in a list": {"type": "array", "items": closed(["^a$"], "a")},
    "of several": {"allOf": [{"type": "object", "properties": {"a": INTEGER}}, closed(["^a$"])]},
    "referred to": {"$ref": "#/$defs/a", "$defs": {"a": closed(["^a$"], "a")}},
    "an alternative": {"anyOf": [INTEGER, closed(["^a$"], "a")]},
    "endless": {"$ref": "#/$defs/a", "$defs": {"a": WITH_ITSELF}},
    "endless list": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": ITSELF, "minItems": 1}}},
    "endless root": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "endless where it is wanted": {"type": "object", "properties": {"o": ITSELF}, "$defs": {"a": WITH_ITSELF}},
}
ALIVE = {
    "more names": closed(["^a"], "ab"),
    "one more name": closed(["^[a-g]$"], *"abcdef"),
    "one of two patterns": closed(["^a$", "^b"], "a"),
    "other keys": closed(["^a$"], "a", additionalProperties=STRING),
    "no pattern": closed([], "a"),
    "ends at some time": {"$ref": "#/$defs/a", "$defs": {"a": WITH_ITSELF | {"required": []}}},
    "has an alternative": {
        "$ref": "#/$defs/a",
        "$defs": {"a": WITH_ITSELF | {"properties": {"x": {"anyOf": [{"type": "null"}, ITSELF]}}}},
    },
    "a list of itself": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": ITSELF}}},
    "long": {"type": "object", "properties": {f"p{at}": STRING for at in range(200)}, "additionalProperties": False},
    "a long string": {"type": "string", "minLength": 500, "maxLength": 600},
    "any": {},
}  # fmt: skip
UNSATISFIABLE = {
    "a key that is not allowed": {"type": "object", "required": ["b"], "additionalProperties": False},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "length": {"type": "string", "minLength": 5, "maxLength": 3},
    "items": {"type": "array", "minItems": 3, "maxItems": 2},
    "enum": {"enum": []},
    "types": {"allOf": [STRING, INTEGER]},
    "values": {"const": 1, "enum": [2]},
    "overlap": closed(["^a"], "ab", required=["ab"], properties={"ab": STRING}),
    "multiples": {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
}


@pytest.fixture(scope="module")
def check():
    matchers, looking = Matchers(TABLE), DeadEnds(TABLE)

    def both(guide):
        matchers.check(guide)
        looking.check(guide)

    return both


@pytest.mark.parametrize("schema", (DEAD | UNSATISFIABLE).values(), ids=(DEAD | UNSATISFIABLE).keys())
def test_schemas_that_no_value_satisfies_or_that_a_text_gets_stuck_in_are_refused(check, schema):
    with pytest.raises(UserError, match="cannot be used") as refused:
        check(Guide.of_schema(schema))
    assert refused.value.code == "invalid_guide"
    with pytest.raises(UserError):
        check(Guide("grammar", f'start: "<call>" %json {json.dumps(schema)} "</call>"'))


@pytest.mark.parametrize("schema", ALIVE.values(), ids=ALIVE.keys())
def test_others_are_taken_and_texts_never_get_stuck_in_them(check, schema):
    guide, matchers = Guide.of_schema(schema), Matchers(TABLE)
    check(guide)
    for seed in range(10):
        chance, matcher = random.Random(seed), matchers.new(guide)
        for _ in range(60):
            allowed = np.flatnonzero(matcher.allowed()).tolist()
            matcher.add_one(chance.choice([one for one in allowed if one in LIKELY] or allowed))
            if matcher.has_ended:
                break


@pytest.mark.parametrize(
    ("grammar", "is_dead"),
    [
        ('start: "a" T | "b"\nT: /a/ & /b/', True),
        ('start: "a" T "c"\nT: /[0-9]+/ & /[a-z]+/', True),
        ('start: "a" | "(" start ")"', False),
        ('start: item+ "END"\nitem: /[a-z]+/ "\\n"', False),
        ('root ::= "a" | "(" root ")"', False),
    ],
)
def test_grammars_whose_texts_get_stuck_are_refused(check, grammar, is_dead):
    if is_dead:
        with pytest.raises(UserError, match="no text can end"):
            check(Guide("grammar", grammar))
    else:
        check(Guide("grammar", grammar))


def test_a_text_that_the_vocabulary_cannot_write_is_a_dead_end():
    """A tokenizer may lack bytes."""
    table = TokenTable((*(bytes([byte]) if byte != ord("c") else b"" for byte in range(256)), b"<e>"), (256,), (256,))
    guide = Guide("grammar", 'start: "a" ("b" | "d" "c")')
    DeadEnds(TABLE).check(guide)
    with pytest.raises((UserError, GuideError)):
        DeadEnds(table).check(guide)


def test_a_long_chain_of_definitions_is_gone_through_once(monkeypatch):
    """As long as a guide has room for it."""
    chain = {f"a{at}": WITH_ITSELF | {"properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}} for at in range(1000)}
    looked_at, required = [], dead_ends._required_parts
    monkeypatch.setattr(dead_ends, "_required_parts", lambda *given: looked_at.append(1) or required(*given))
    assert dead_ends._endless({"$ref": "#/$defs/a0", "$defs": chain | {"a1000": INTEGER}}) is None
    assert len(looked_at) < 3000
    assert dead_ends._endless({"$ref": "#/$defs/a0", "$defs": chain | {"a1000": ITSELF | {"$ref": "#/$defs/a0"}}})
