"""Reasoning apart from content: where it begins and ends, however an answer is split into tokens."""

import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from longhelix.engine.text.chat_template import ChatTemplate
from longhelix.engine.text.reasoning import FORMS, PARSERS, ReasoningSplitter, form_of
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError
from longhelix.scheduler.guide import ReasoningTags
from longhelix.values import one_of

pytestmark = pytest.mark.unit

THINK = ReasoningTags("<think>", "</think>")
OPEN = ReasoningTags("<think>", "</think>", is_open=True)
CASES = [
    (THINK, "<think>\nWhy?\n\nSo.\n</think>\n\nYes.\n", "Why?\n\nSo.", "Yes.\n"),
    (THINK, "<think>a</think>b", "a", "b"),
    (THINK, "\n <think>a</think>b", "a", "b"),
    (THINK, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (THINK, "<think></think>Yes.", "", "Yes."),
    (THINK, "Yes <think>no</think>.", "", "Yes <think>no</think>."),
    (THINK, "Yes</think>no", "", "Yes</think>no"),
    (THINK, "\n\n  indented", "", "\n\n  indented"),
    (THINK, "<think>a</think>\n\n    code", "a", "    code"),
    (THINK, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
    (THINK, "<think>cut\nin", "cut\nin", ""),
    (THINK, "<think>cut</thi", "cut</thi", ""),
    (THINK, "<thi", "", "<thi"),
    (THINK, "<thing>", "", "<thing>"),
    (THINK, "", "", ""),
    (THINK, "<think>a < b </ c </thin>\r\n</think>\r\nd", "a < b </ c </thin>", "d"),
    (THINK, "<think>a<think>b</think>c", "a<think>b", "c"),
    (OPEN, "Why?\n</think>\n\nYes.", "Why?", "Yes."),
    (OPEN, "\n<think>\nWhy?</think>Yes.", "Why?", "Yes."),
    (OPEN, "</think>Yes.", "", "Yes."),
    (OPEN, "cut inside", "cut inside", ""),
    (OPEN, "<thi", "<thi", ""),
    (ReasoningTags("[THINK]", "[/THINK]"), "[THINK]a[/[/THINK]b", "a[/", "b"),
]


def split(tags, pieces):
    """Reasoning, content, and the tokens of reasoning, after what each piece gave was compared with the whole."""
    found = ReasoningSplitter(tags)
    come = [found.push(piece) for piece in pieces]
    reasoning, content = found.finish()
    reasoning = "".join(more or "" for more, _ in come) + reasoning
    assert reasoning == found.text
    return reasoning, "".join(more for _, more in come) + content, found.num_tokens


@pytest.mark.parametrize(("tags", "text", "reasoning", "content"), CASES)
def test_the_split_does_not_depend_on_the_pieces(tags, text, reasoning, content):
    assert split(tags, [text])[:2] == (reasoning, content)
    assert split(tags, list(text))[:2] == (reasoning, content)
    draw = random.Random(text)
    for _ in range(30):
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(tags, pieces)[:2] == (reasoning, content), pieces


def test_reasoning_comes_at_once_and_line_ends_only_once_they_are_known_to_be_inside():
    found = ReasoningSplitter(OPEN)
    assert [found.push(piece) for piece in ("a", "\n\n", "b", "<", "/", "c", "\n")] == [
        ("a", ""), ("", ""), ("\n\nb", ""), ("", ""), ("", ""), ("</c", ""), ("", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tags", "pieces", "count"),
    [
        (THINK, ["<think>", "\n", "a", "b", "</think>", "\n\n", "c"], 5),
        (THINK, ["<", "think", ">", "a", "</", "think", ">\n", "c"], 7),
        (OPEN, ["a", "</think>", "c", "d"], 2),
        (OPEN, ["a", "b"], 2),
        (THINK, ["\n", "a", "b"], 0),
        (OPEN, ["", "a", "", "</think>b", "c"], 4),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_tags(tags, pieces, count):
    assert split(tags, pieces)[2] == count


def test_text_that_no_token_brings_is_split_as_well():
    found = ReasoningSplitter(OPEN)
    found.push("a</")
    assert found.finish("think>b") == ("", "b")
    assert (found.text, found.num_tokens) == ("a", 1)


TEMPLATES = {
    "qwen3": "{{ messages[0].content.split('</think>')[-1] }}<|im_start|>assistant\n",
    "opens": "{{ messages[0].content }}<assistant><think>\n",
}


def tokenizer_of(template, special):
    vocab = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for token in ("<assistant>", "<think>", "</think>"):
        backend.add_tokens([AddedToken(token, special=special or token == "<assistant>", normalized=False)])
    return Tokenizer(backend, ChatTemplate(template, {}))


@pytest.mark.parametrize("special", [False, True])
def test_tags_follow_from_the_prompt(special):
    tokenizer = tokenizer_of(TEMPLATES["opens"], special)
    form = tokenizer.reasoning_form("auto")
    ids = (257, 258) if special else (None, None)

    def tags(text, form=form):
        return tokenizer.reasoning_tags(form, tokenizer.encode_more(text))

    assert form is FORMS["qwen3"]
    assert tags("What?<assistant>") == ReasoningTags("<think>", "</think>", *ids)
    opened = ReasoningTags("<think>", "</think>", *ids, is_open=True)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is </think>?"}])
    assert tokenizer.reasoning_tags(form, prompt) == opened
    assert tags("What is <think>?<assistant>").is_open is False
    assert tags("What?<assistant><think>\n\n</think>\n\n") is None
    assert tags("What?<assistant></think>", FORMS["deepseek_r1"]) is None
    assert tags("What?<assistant>", FORMS["deepseek_r1"]) == opened

    def continued(text):
        return tokenizer.reasoning_tags(form, tokenizer.encode_more(text), True)

    assert continued("<assistant><think>\nWell, " + "a" * 99) == opened
    assert continued("<assistant><think>a</think>\nYes, ") is None
    assert continued("What is <think>?<assistant>Yes, ") is None


def test_auto_looks_at_the_template_and_the_vocabulary():
    assert form_of("auto", TEMPLATES["qwen3"], ()) is FORMS["qwen3"]
    assert form_of("auto", "", ("<think>", "</think>")) is FORMS["qwen3"]
    assert form_of("auto", "{{ messages }}", ("<think>", "a")) is None
    assert form_of("none", TEMPLATES["opens"], ("<think>", "</think>")) is None
    assert form_of("deepseek_r1", "", ()) is FORMS["deepseek_r1"]
    with pytest.raises(UserError, match=json.dumps("r1")[1:-1]):
        one_of("reasoning_parser", "r1", PARSERS)
