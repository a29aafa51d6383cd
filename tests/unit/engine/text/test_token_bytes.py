"""The bytes of tokens, beside what decoders make of them."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import MERGES, byte_level_backend, byte_level_metadata, sentencepiece_metadata, spaced_backend
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

TEXT = "the 日本 quick\tbrown\nfox é says hello to the world"


@pytest.mark.parametrize("build", [byte_level_backend, spaced_backend])
def test_bytes_of_a_text_are_those_of_its_tokens(build):
    backend = build()
    backend.add_tokens([AddedToken("<é>", special=False, normalized=False)])
    tokenizer = Tokenizer(backend, None)
    found = tokenizer.token_bytes
    ids = tokenizer.encode_more(TEXT)
    assert b"".join(found[token_id] for token_id in ids).decode().strip() == TEXT
    assert found[backend.token_to_id("<é>")] == "<é>".encode()
    assert found.keys() == set(backend.get_vocab().values())
    for token_id, own in found.items():
        piece = tokenizer.piece(token_id)
        if "\ufffd" not in piece and token_id not in tokenizer.special_ids:
            assert token_id == backend.token_to_id("<é>") or own == piece.encode()


def test_tokens_of_part_of_a_character_have_its_bytes():
    backend = byte_level_backend()
    found = {spelled: token_id for token_id, spelled in Tokenizer(backend, None).token_bytes.items()}
    for byte in "日".encode():
        assert bytes([byte]) in found
    spaced = Tokenizer(spaced_backend(), None).token_bytes
    assert {bytes([byte]) for byte in range(256)} <= set(spaced.values())


def test_gguf():
    byte_level = Tokenizer.from_gguf(byte_level_metadata("gpt-2", MERGES))
    assert b"12" in byte_level.token_bytes.values()
    assert [byte_level.token_bytes[token_id] for token_id in sorted(byte_level.special_ids)] == [b"<s>"]
    spaced = Tokenizer.from_gguf(sentencepiece_metadata({"a": 0.0, "▁a": 1.0}, ["<0x41>"]))
    assert sorted(spaced.token_bytes.values()) == [b" a", b"A", b"a"]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_tokens_of_other_kinds_have_none(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UserError, match="guides need a byte-level or SentencePiece tokenizer"):
        _ = Tokenizer(backend, None).token_bytes


# Whole texts and streams, of tokenizers that spell them in different ways.


def metaspace_backend(scheme):
    backend = spaced_backend()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return backend


def unstripped_backend():
    backend = spaced_backend()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


BACKENDS = [
    byte_level_backend(),
    spaced_backend(),
    metaspace_backend("always"),
    metaspace_backend("never"),
    unstripped_backend(),
]
IDS = st.lists(st.one_of(st.integers(0, 130), st.integers(131, 700)), max_size=12)


@given(backend=st.sampled_from(BACKENDS), text=st.text(max_size=20), more=st.text(max_size=10))
def test_texts_are_those_of_the_decoder(backend, text, more):
    tokenizer = Tokenizer(backend, None)
    ids = tokenizer.encode_more(text) + tokenizer.encode_more(more)
    expected = backend.decode(ids, skip_special_tokens=False)
    # Where bytes are no text, the decoder of byte fallback gives up more of them than Python's.
    if "\ufffd" not in expected:
        assert tokenizer.spell(ids) == expected
        assert tokenizer.decode(ids) == backend.decode(ids)


@given(backend=st.sampled_from(BACKENDS), ids=IDS)
def test_bytes_that_are_no_text_are_decoded_as_python_does(backend, ids):
    tokenizer = Tokenizer(backend, None)
    token_bytes = tokenizer.token_bytes
    expected = b"".join(token_bytes.get(token_id, b"") for token_id in ids).decode("utf-8", "replace")
    assert tokenizer.spell(ids, begins=False) == expected
    # At the beginning of a text, Metaspace takes away all blanks of the first token.
    first = token_bytes.get(ids[0], b"") if ids else b""
    bare = first.replace(b" ", b"") + b"".join(token_bytes.get(token_id, b"") for token_id in ids[1:])
    assert tokenizer.spell(ids) in (expected, expected.lstrip(" "), bare.decode("utf-8", "replace"))


def test_blanks_of_the_first_token_are_those_of_the_decoder():
    backend = metaspace_backend("always")
    assert "o▁t" in backend.get_vocab()
    ids = [backend.token_to_id("o▁t")] * 2
    assert Tokenizer(backend, None).spell(ids) == backend.decode(ids) == "oto t"


@given(backend=st.sampled_from(BACKENDS), ids=IDS, cut=st.integers(0, 12))
def test_a_stream_goes_on_in_the_text_of_the_tokens_before_it(backend, ids, cut):
    tokenizer = Tokenizer(backend, None)
    before, after = ids[:cut], ids[cut:]
    stream = tokenizer.stream(before)
    text = "".join(map(stream.push, after)) + stream.finish()
    begin, whole = tokenizer.decode(before), tokenizer.decode(ids)
    # A character that ends here belongs to this text, and the text before shows that it was cut.
    assert whole == begin + text or (begin.endswith("\ufffd") and whole == begin[:-1] + text)


def test_a_character_may_begin_in_the_text_before():
    tokenizer = Tokenizer(byte_level_backend(), None)
    found = {spelled: token_id for token_id, spelled in tokenizer.token_bytes.items()}
    first, *rest = (found[bytes([byte])] for byte in "日".encode())
    for after, text in ((rest, "日"), ([found[b"a"]], "a"), ([first], "\ufffd"), ([], "")):
        stream = tokenizer.stream([first])
        assert "".join(map(stream.push, after)) + stream.finish() == text


def test_added_tokens_are_spelled_as_texts_have_them():
    byte_level = byte_level_backend()
    byte_level.add_tokens(["é"])
    assert Tokenizer(byte_level, None).decode([byte_level.token_to_id("é")]) == "é"
    spaced = unstripped_backend()
    spaced.add_tokens([AddedToken("▁▁", normalized=False)])
    assert Tokenizer(spaced, None).decode([spaced.token_to_id("▁▁")]) == "  "


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.BPEDecoder(),
    ],
)
def test_other_decoders_make_the_text_themselves(decoder):
    backend = spaced_backend()
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, None)
    ids = tokenizer.encode_more("the quick brown fox")
    assert tokenizer.spell(ids) == backend.decode(ids)
    stream = tokenizer.stream(ids[:3])
    text = "".join(map(stream.push, ids[3:])) + stream.finish()
    assert backend.decode(ids[:3]) + text == backend.decode(ids)


@given(backend=st.sampled_from(BACKENDS), text=st.text(max_size=20))
def test_parts_of_a_prompt_are_the_prompt(backend, text):
    tokenizer = Tokenizer(backend, None)
    ids = tokenizer.encode(text)
    parts = tokenizer.parts(text)
    assert len(parts) == len(ids)
    assert "".join(parts) == text or not tokenizer.encode_more(text)
    assert "".join(tokenizer.token_texts(ids)) == tokenizer.spell(ids)
