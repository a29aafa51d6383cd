"""Matchers beside a look at every token of the vocabulary."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from longhelix.compute.runner import matchers as matchers_module
from longhelix.compute.runner.matchers import GuideError, Matcher, Matchers
from longhelix.errors import UserError
from longhelix.scheduler.guide import FORMATS, Guide, ReasoningTags, TokenTable

pytestmark = pytest.mark.unit

MARK, EOS, OTHER_EOS = 300, 301, 302
PIECES = [
    b"ab", b"abc", b"bc", b"cab", b"((", b"))", b"()", b"(a", b"a)", b'{"', b'":', b'": ', b'"}', b'", "', b"true",
    b"tr", b"rue", b"ue}", b"12", b"-1", b"3.5", b"null", "é".encode(), "日".encode(), "é".encode()[1:] + b"a", b"ab",
    b"", b"\n  ", b"yes", b"ye", b"no", b"not", b"es", b"\xf0\x9f", b"\x98\x80",
]  # fmt: skip
TABLE = TokenTable(
    (
        *(bytes([byte]) for byte in range(256)),
        *PIECES,
        *[b""] * (MARK - 256 - len(PIECES)),
        b"<mark>",
        b"<e>",
        b"<f>",
        b"",
    ),
    (MARK, EOS, OTHER_EOS),
    (EOS, OTHER_EOS),
)


@pytest.fixture(scope="module")
def matchers():
    return Matchers(TABLE)


def one_of(*texts):
    texts = [text.encode() for text in texts]
    return lambda begun: any(text.startswith(begun) for text in texts), lambda whole: whole in texts


def bits(begun):
    """Of [ab]*c in a regular expression, and é or 日 behind it."""
    return bool(re.fullmatch(rb"[ab]*|[ab]*c(|\xc3|\xe6|\xe6\x97|\xc3\xa9|\xe6\x97\xa5)", begun))


WORDS = ["yes", "no", "not", "né", 'a"b\\c', "日本"]
NESTED = ["(" * depth + "a" + ")" * depth for depth in range(60)]  # deeper than a walk comes
CASES = [
    (Guide.of_choices(WORDS), one_of(*WORDS)),
    (Guide("grammar", 'start: "a" | "(" start ")"'), one_of(*NESTED)),
    (Guide("grammar", 'root ::= "a" | "(" root ")"'), one_of(*NESTED)),
    (
        Guide("regex", "[ab]*c(é|日)"),
        (bits, lambda text: bool(re.fullmatch("[ab]*c(é|日)".encode(), text))),
    ),
    (Guide("regex", "(ab|abc|abcab)?"), one_of("", "ab", "abc", "abcab")),
    (
        Guide.of_schema({"enum": ["ab", 12, None, True], "x-guidance": {"whitespace_pattern": "x"}}),
        one_of('"ab"', "12", "null", "true"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("guide", "language"), CASES, ids=[f"{at}" for at in range(len(CASES))])
def test_a_mask_has_the_tokens_that_keep_the_text_one_that_can_be_completed(matchers, guide, language, seed):
    """Of all of them, those that stand for the same among them, and of what begins in the middle of a character."""
    begins, ends = language
    chance, text, matcher = random.Random(seed), b"", matchers.new(guide)
    for _ in range(12):
        expected_V = np.array([token != b"" and begins(text + token) for token in TABLE.tokens])
        expected_V[list(TABLE.special_ids)] = False
        expected_V[list(TABLE.eos_ids)] = ends(text)
        assert np.flatnonzero(matcher.allowed()).tolist() == np.flatnonzero(expected_V).tolist(), text
        chosen = chance.choice(np.flatnonzero(expected_V).tolist())
        matcher.add_one(chosen)
        if chosen in TABLE.eos_ids:
            break
        text += TABLE.tokens[chosen]
    assert matcher.has_ended == (chosen in TABLE.eos_ids)


def walk(matcher, chance, most=60):
    """A text of tokens that were allowed, and whether it has its end."""
    chosen = []
    while len(chosen) < most and not matcher.has_ended:
        chosen.append(chance.choice(np.flatnonzero(matcher.allowed()).tolist()))
        matcher.add_one(chosen[-1])
    return chosen


SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "n": {"type": "integer"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["ab", "n", "s"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(20))
def test_a_text_that_has_ended_is_json_of_its_schema(matchers, seed):
    matcher = matchers.new(Guide.of_schema(SCHEMA))
    chosen = walk(matcher, random.Random(seed), 400)
    text = b"".join(TABLE.tokens[token_id] for token_id in chosen if token_id < MARK).decode()
    outside = re.sub(r'"([^"\\]|\\.)*("|$)', "s", text)
    assert all(re.fullmatch(r" |\r?\n[ \t]{0,40}", blank) for blank in re.findall(r"\s+", outside))
    if matcher.has_ended:
        found = json.loads(text)
        assert (found.keys(), type(found["ab"]), type(found["n"])) == ({"ab", "n", "s"}, bool, int)
        assert len(found["s"]) <= 3


@pytest.mark.parametrize("guide", [Guide("json"), Guide.of_schema(SCHEMA)])
def test_one_that_is_told_its_tokens_at_once_goes_on_as_the_one_that_was_asked_each_time(matchers, guide):
    asked, told = matchers.new(guide), matchers.new(guide)
    chosen = walk(asked, random.Random(3), 9)
    for token_id in chosen:
        told.add_one(token_id)
    assert np.array_equal(asked.allowed(), told.allowed())


def test_sequences_of_one_guide_have_it_compiled_once():
    """However many others come in between, up to hundreds."""
    matchers, guides = Matchers(TABLE), [Guide("regex", f"a{{{count}}}") for count in range(1, 257)]
    for _ in range(2):
        for guide in guides:
            matchers.new(guide)
    assert matchers.steps == 256
    matchers.new(Guide("json"))
    matchers.trim()  # the first one is left out for it
    matchers.new(guides[1])
    assert matchers.steps == 257
    matchers.new(guides[0])
    assert matchers.steps == 258


@pytest.mark.parametrize(("limit", "least"), [("max_lexer_states", 150), ("step_lexer_fuel", 1000)])
def test_what_others_of_a_guide_have_used_up_ends_no_text(monkeypatch, limit, least):
    """They come as far as alone, whoever was there before, and begins behind them."""
    hard = Guide("regex", "(a|b|ab|abc|bc|cab)*.{30}x")
    monkeypatch.setitem(matchers_module._LIMITS, limit, least)

    def masks(matcher):
        found = []
        for _ in range(100):
            try:
                found.append(matcher.allowed().tolist())
            except GuideError:
                return found
            matcher.add_one(ord("a"))
        raise AssertionError("it reaches no limit")

    matchers = Matchers(TABLE)
    alone = masks(Matcher(matchers, hard, matchers.compiled(hard), shared=False))
    assert 1 < len(alone) < 30
    for found in map(masks, [matchers.new(hard), matchers.new(hard), matchers.new(hard)]):
        assert found[: len(alone)] == alone
    assert masks(matchers.new(hard))[: len(alone)] == alone


def test_copies_of_one_guide_do_not_feel_each_other(matchers):
    guide = Guide("regex", "(ab|c)*")
    first, second = matchers.new(guide), matchers.new(guide)
    before = second.allowed()
    walk(first, random.Random(1), 5)
    assert np.array_equal(second.allowed(), before)


def test_what_is_not_allowed_ends_it(matchers):
    matcher = matchers.new(Guide.of_choices(["yes"]))
    matcher.add_one(ord("n"))
    with pytest.raises(GuideError, match="doesn't satisfy the grammar"):
        matcher.allowed()
    matcher.add_one(ord("y"))
    with pytest.raises(GuideError):
        matcher.allowed()


def test_behind_its_end_a_text_is_asked_nothing(matchers):
    matcher = matchers.new(Guide.of_choices(["ab"]))
    for token_id in (ord("a"), ord("b"), OTHER_EOS, 7, 8):
        matcher.add_one(token_id)
    assert matcher.has_ended


def test_work_of_a_token_is_bounded_by_counts(monkeypatch):
    """The same ones each time."""
    hard = Guide("regex", "(a|b|ab|abc|bc|cab)*.{30}x")

    def steps(fuel):
        monkeypatch.setitem(matchers_module._LIMITS, "step_lexer_fuel", fuel)
        matcher = Matchers(TABLE).new(hard)
        for count in range(40):
            try:
                matcher.allowed()
            except GuideError as error:
                return count, str(error)
            matcher.add_one(ord("a"))
        return None

    found = [steps(100) for _ in range(2)]
    assert found[0] == found[1] is not None
    assert "<" not in found[0][1]
    assert steps(200_000) is None


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (Guide("regex", "a(b"), "the regular expression cannot be used: .*unclosed group"),
        (Guide("regex", "(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
        (Guide("grammar", "start: foo"), "the grammar cannot be used: .*unknown name"),
        (Guide("grammar", "root ::= (("), "the grammar cannot be used: .*Expected '\\)'"),
        (Guide("grammar", "root ::= " + "(" * 50_000), "the grammar cannot be used"),
        (Guide("grammar", "start: <nothing>"), "unknown special token"),
        (Guide.of_schema({"type": "strange"}), "the JSON schema cannot be used: .*Invalid type"),
        (Guide.of_schema({"propertyNames": {"pattern": "a"}}), "Unimplemented keys"),
        (Guide.of_schema({"$ref": "http://example.com/schema"}), "Default retriever does not fetch resources"),
        (Guide.of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "not supported. Use anyOf"),
        (Guide.of_schema({"$ref": "#"}), "no text .* can follow it"),
        (Guide("grammar", "start: T\nT: " + " & ".join(f"/(.*a.{{{n}}}b.*)/" for n in range(12))), "fuel exhausted"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_a_sentence(matchers, guide, words):
    with pytest.raises(UserError, match=words) as refused:
        matchers.check(guide)
    assert guide.kind != "json_schema" or "at 1(" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert refused.value.code == "invalid_guide"


# Those of JSON Schema 2020-12, and some that pydantic, OpenAPI and Google's APIs write.
KNOWN_FORMATS = [
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "path", "password", "binary", "byte", "int64", "double", "base64url",
]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN_FORMATS)
def test_a_format_is_enforced_or_passed_over(matchers, name):
    matcher = matchers.new(Guide.of_schema({"type": "string", "format": name}))
    for byte in b'"\\':  # a backslash, which no format allows that is enforced
        matcher.add_one(byte)
    if name not in FORMATS:
        assert matcher.allowed()[ord("\\")]
        return
    with pytest.raises(GuideError):
        matcher.allowed()


def test_a_text_that_the_model_has_no_tokens_for(matchers):
    few = Matchers(TokenTable((b"a", b"b", b"<e>"), (2,), (2,)))
    with pytest.raises(UserError, match="no text that the model has tokens for can follow it"):
        few.check(Guide.of_choices(["c"]))
    matcher = few.new(Guide.of_choices(["ac"]))
    matcher.add_one(0)
    with pytest.raises(GuideError):
        matcher.allowed()


def test_a_grammar_cannot_have_tokens_forced(matchers):
    """Which would need a tokenizer."""
    matcher = matchers.new(Guide("grammar", '%llguidance {"no_forcing": false}\nstart: "abc"'))
    assert [TABLE.tokens[at] for at in np.flatnonzero(matcher.allowed())] == [b"a", b"ab", b"abc", b"ab"]


def test_guides_that_texts_have_followed_count_with_all_states_they_may_have():
    """256 of them took 620 MB."""
    matchers, guides = Matchers(TABLE), [Guide("regex", f"[ab]*a[ab]{{{count}}}x") for count in range(1, 257)]
    for guide in guides:
        walk(matchers.new(guide), random.Random(1), 3)
        matchers.trim()
    steps = matchers.steps
    for guide in guides[-20:]:
        matchers.new(guide)
    assert matchers.steps == steps, "those of the last ones are kept"
    matchers.new(guides[-40])
    assert matchers.steps == steps + 1


TAGGED = (*TABLE.tokens, b"<think>", b"</think>", b"</", b"think", b">\n\n")


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def tagged(request):
    """Matchers of a vocabulary whose tags are text, or special tokens; and the tags, closed and open."""
    ids = (len(TABLE.tokens), len(TABLE.tokens) + 1) if request.param else ()
    table = TokenTable(TAGGED, (*TABLE.special_ids, *ids), TABLE.eos_ids)
    tags = [ReasoningTags("<think>", "</think>", *(ids or (None, None)), is_open=is_open) for is_open in (False, True)]
    return Matchers(table), *tags


def follows(matchers, guide, *pieces):
    """Whether an answer of these tokens may come, and may end behind them, and nowhere before."""
    matchers.check(guide)
    matcher = matchers.new(guide)
    for piece in pieces:
        allowed_V = matcher.allowed()
        token_id = TAGGED.index(piece)
        if not allowed_V[token_id] or allowed_V[EOS]:
            return False
        matcher.add_one(token_id)
    return bool(matcher.allowed()[EOS])


@pytest.mark.parametrize(
    ("guide", "answer"),
    [
        (Guide("json"), [b'{"', b"a", b'":', b"1", b"}"]),
        (Guide.of_choices(["yes", "no"]), [b"ye", b"s"]),
        (Guide("regex", "[ab]{2}/c"), [b"ab", b"/", b"c"]),
        (Guide("grammar", 'root ::= "a" | "(" root ")"'), [b"(a", b")"]),
        (Guide("grammar", 'start: text\ntext: "a" | "(" text ")"'), [b"(a", b")"]),
    ],
    ids=lambda each: each.kind + each.text[:4] if isinstance(each, Guide) else "",
)
def test_a_guide_is_of_what_comes_behind_the_reasoning(tagged, guide, answer):
    matchers, closed, opened = tagged
    free = [b"not", b" ", b"<", b"</", b"t", b"\n  ", b'{"']
    after_open, begun = replace(guide, reasoning=opened), replace(guide, reasoning=closed)
    for blank in ([], [b"\n"], [b"\n", b"\n"]):
        assert follows(matchers, after_open, *free, b"</think>", *blank, *answer)
        assert follows(matchers, begun, b"<think>", *free, b"</think>", *blank, *answer)
    assert follows(matchers, after_open, *free, b"</", b"think", b">\n\n", *answer)
    assert follows(matchers, after_open, b"</think>", *answer)
    assert follows(matchers, begun, *answer)
    assert not follows(matchers, after_open, *answer)
    assert not follows(matchers, after_open, b"</think>", b"not")
    assert not follows(matchers, begun, b"not")
    assert not follows(matchers, after_open, b"</think>", b"</think>")
    assert not follows(matchers, guide, b"<think>" if guide.kind != "json" else b"not")


def test_guides_with_and_without_reasoning_are_different_ones(matchers):
    guide = Guide.of_choices(["yes"])
    tags = ReasoningTags("<think>", "</think>", is_open=True)
    assert len({guide, replace(guide, reasoning=tags), replace(guide, reasoning=replace(tags, is_open=False))}) == 3
    yes = TABLE.tokens.index(b"yes")
    for _ in range(2):
        assert matchers.new(guide).allowed()[yes]
        assert not matchers.new(guide).allowed()[ord("q")]
        assert matchers.new(replace(guide, reasoning=tags)).allowed()[ord("q")]
