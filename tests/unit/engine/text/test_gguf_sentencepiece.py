"""SentencePiece vocabularies of GGUF files. What texts become is recorded from llama.cpp."""

import gguf
import pytest

from longhelix.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

KINDS = gguf.TokenType
NAMED = {"<unk>": KINDS.UNKNOWN, "<s>": KINDS.CONTROL, "</s>": KINDS.CONTROL, "<pad>": KINDS.CONTROL}
# The scores of many pieces are the same, and many pieces can be joined of others in several ways.
PIECES = {
    **dict.fromkeys("▁abcdéx.", 0.0),
    **dict.fromkeys(["▁▁", "ab", "bc", "cd", "▁a", "aa"], -1.0),
    **dict.fromkeys(["▁▁▁", "abc", "bcd", "aaa", "aab", "b▁", "▁▁▁▁"], -2.0),
    **dict.fromkeys(["abcd", "▁ab", "x.", "..", "...", "a▁", "dé"], -0.5),
}


def metadata(pieces=PIECES, unused=(), **keys):
    tokens = [*NAMED, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    kinds = {**NAMED, "<think>": KINDS.USER_DEFINED, **dict.fromkeys(unused, KINDS.UNUSED)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(kinds.get(token, KINDS.BYTE if token.startswith("<0x") else KINDS.NORMAL)) for token in tokens
        ],
        "tokenizer.ggml.scores": [pieces.get(token, 0.0) for token in tokens],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def without(key, **keys):
    return {name: value for name, value in metadata(**keys).items() if name != f"tokenizer.ggml.{key}"}


FILES = {
    "ties": metadata(),
    "all tie": without("scores"),
    "integers": metadata({piece: int(2 * score) for piece, score in PIECES.items()}),
    "unused pieces": metadata(unused=["abc", "▁▁", "x."]),
    "no prefix": metadata(add_space_prefix=False),
    "no BOS": metadata(add_bos_token=False),
    "EOS": metadata(add_eos_token=True),
    "other ids": metadata(bos_token_id=3, eos_token_id=1, add_eos_token=True, remove_extra_whitespaces=True),
}
RECORDED = {
    ("ties", ".daaaab"): ["<s>", "▁", ".", "d", "aa", "aab"],
    ("ties", "baaaaba"): ["<s>", "▁", "b", "aa", "aab", "a"],
    ("ties", "abaabc a"): ["<s>", "▁ab", "aa", "bc", "▁a"],
    ("ties", "  ....éé"): ["<s>", "▁▁▁", "...", ".", "é", "é"],
    ("ties", "a<s>b</s> ab"): ["<s>", "▁a", "<s>", "▁", "b", "</s>", "▁▁", "ab"],
    ("ties", "<think>ab <unk>x"): ["<s>", "<think>", "▁ab", "▁", "<unk>", "▁", "x"],
    ("ties", "日é😀"): ["<s>", "▁", "<0xE6>", "<0x97>", "<0xA5>", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"],
    ("ties", "ab\n\ncd"): ["<s>", "▁ab", "<0x0A>", "<0x0A>", "cd"],
    ("ties", "▁ a"): ["<s>", "▁▁", "▁a"],
    ("ties", "<0x41>"): ["<s>", "▁", "<0x3C>", "<0x30>", "x", "<0x34>", "<0x31>", "<0x3E>"],
    ("all tie", "b a"): ["<s>", "▁", "b▁", "a"],
    ("all tie", "  a"): ["<s>", "▁▁▁", "a"],
    ("all tie", "aa a"): ["<s>", "▁a", "a▁", "a"],
    ("all tie", "aaaaa"): ["<s>", "▁a", "aaa", "a"],
    ("integers", ".daaaab"): ["<s>", "▁", ".", "d", "aa", "aab"],
    ("integers", "baaaaba"): ["<s>", "▁", "b", "aa", "aab", "a"],
    ("integers", "abaabc a"): ["<s>", "▁ab", "aa", "bc", "▁a"],
    ("integers", "  ....éé"): ["<s>", "▁▁▁", "...", ".", "é", "é"],
    ("unused pieces", " .d"): ["<s>", "▁▁", ".", "d"],
    ("unused pieces", " xa"): ["<s>", "▁▁", "x", "a"],
    ("unused pieces", " ax"): ["<s>", "▁▁", "a", "x"],
    ("no prefix", ".daaaab"): ["<s>", ".", "d", "aa", "aab"],
    ("no prefix", "baaaaba"): ["<s>", "b", "aa", "aab", "a"],
    ("no prefix", "aabccbb "): ["<s>", "aa", "bc", "c", "b", "b▁"],
    ("no prefix", "abaabc a"): ["<s>", "ab", "aa", "bc", "▁a"],
    ("no prefix", "a<s>b</s> ab"): ["<s>", "a", "<s>", "b", "</s>", "▁ab"],
    ("no prefix", "<think>ab <unk>x"): ["<s>", "<think>", "ab", "▁", "<unk>", "x"],
    ("no BOS", ".daaaab"): ["▁", ".", "d", "aa", "aab"],
    ("no BOS", "baaaaba"): ["▁", "b", "aa", "aab", "a"],
    ("no BOS", "abaabc a"): ["▁ab", "aa", "bc", "▁a"],
    ("no BOS", "  ....éé"): ["▁▁▁", "...", ".", "é", "é"],
    ("no BOS", "日é😀"): ["▁", "<0xE6>", "<0x97>", "<0xA5>", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"],
    ("no BOS", " "): ["▁▁"],
    ("EOS", ".daaaab"): ["<s>", "▁", ".", "d", "aa", "aab", "</s>"],
    ("EOS", "baaaaba"): ["<s>", "▁", "b", "aa", "aab", "a", "</s>"],
    ("EOS", "abaabc a"): ["<s>", "▁ab", "aa", "bc", "▁a", "</s>"],
    ("EOS", "  ....éé"): ["<s>", "▁▁▁", "...", ".", "é", "é", "</s>"],
    ("EOS", "aaaaa"): ["<s>", "▁a", "aa", "aa", "</s>"],
    ("EOS", " "): ["<s>", "▁▁", "</s>"],
    ("other ids", ".daaaab"): ["<pad>", "▁", ".", "d", "aa", "aab", "<s>"],
    ("other ids", "baaaaba"): ["<pad>", "▁", "b", "aa", "aab", "a", "<s>"],
    ("other ids", "abaabc a"): ["<pad>", "▁ab", "aa", "bc", "▁a", "<s>"],
    ("other ids", "  ....éé"): ["<pad>", "▁▁▁", "...", ".", "é", "é", "<s>"],
    ("other ids", "aaaaa"): ["<pad>", "▁a", "aa", "aa", "<s>"],
    ("other ids", " "): ["<pad>", "▁▁", "<s>"],
}


@pytest.mark.parametrize(("file", "text"), RECORDED)
def test_texts_become_what_llama_cpp_makes_of_them(file, text):
    tokens = FILES[file]["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(FILES[file])
    assert [tokens[token_id] for token_id in tokenizer.encode(text)] == RECORDED[file, text]


def test_the_parts_of_a_text_are_its_pieces():
    tokenizer = Tokenizer.from_gguf(metadata())
    tokens = metadata()["tokenizer.ggml.tokens"]
    text = "aab<s>日 abé<think> b"
    assert list(zip((tokens[token_id] for token_id in tokenizer.encode(text)), tokenizer.parts(text), strict=True)) == [
        *[("<s>", ""), ("▁a", "a"), ("ab", "ab"), ("<s>", "<s>"), ("▁", "")],
        *[("<0xE6>", ""), ("<0x97>", ""), ("<0xA5>", "日"), ("▁ab", " ab"), ("é", "é")],
        *[("<think>", "<think>"), ("▁▁", " "), ("b", "b")],
    ]


def test_a_long_text_of_one_word_is_joined_in_steps_that_do_not_grow_with_it():
    tokenizer = Tokenizer.from_gguf(metadata())
    assert len(tokenizer.encode_more("a" * 300_000)) == 150_000


@pytest.mark.parametrize(("keys", "ends"), [({}, ["</s>"]), ({"eos_token_id": 3}, ["</s>", "<pad>"])])
def test_an_answer_ends_at_the_eos_that_a_file_says_or_at_llama_cpps(keys, ends):
    tokenizer = Tokenizer.from_gguf(metadata(**keys))
    assert [tokenizer.spell([token_id]) for token_id in tokenizer.end_ids] == ends


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "<s>|</s>|<unk>|"),
        ({"padding_token_id": 3, "unknown_token_id": 1}, "<s>|</s>|<s>|<pad>"),
        ({"bos_token_id": 3, "eos_token_id": 0}, "<pad>|<unk>|<unk>|"),
        ({"padding_token_id": 2**32 - 1, "unknown_token_id": -1}, "<s>|</s>|<unk>|"),
    ],
)
def test_templates_know_the_special_tokens(keys, says):
    template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}"
    tokenizer = Tokenizer.from_gguf({**metadata(add_space_prefix=False, **keys), "tokenizer.chat_template": template})
    assert tokenizer.spell(tokenizer.encode_chat([{"role": "user", "content": "a"}])) == says


def test_a_template_of_its_own_for_tools():
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b{% if tools %}{% endif %}"}
    tokenizer = Tokenizer.from_gguf({**metadata(), **templates})
    messages = [{"role": "user", "content": "c"}]
    assert tokenizer.spell(tokenizer.encode_chat(messages)) == "a"
    assert tokenizer.spell(tokenizer.encode_chat(messages, tools=[{"type": "function"}])) == "b"
