"""The bytes of tokens, beside what decoders make of them."""

import pytest
import tokenizers
from test_tokenizer import MERGES, byte_level_backend, byte_level_metadata, sentencepiece_metadata, spaced_backend
from tokenizers import AddedToken, decoders, models

from longhelix.errors import UserError
from longhelix.text.token_bytes import token_bytes
from longhelix.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

TEXT = "the 日本 quick\tbrown\nfox é says hello to the world"


@pytest.mark.parametrize("build", [byte_level_backend, spaced_backend])
def test_bytes_of_a_text_are_those_of_its_tokens(build):
    backend = build()
    backend.add_tokens([AddedToken("<é>", special=False, normalized=False)])
    tokenizer, found = Tokenizer(backend, None), token_bytes(backend)
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
    found = {spelled: token_id for token_id, spelled in token_bytes(backend).items()}
    for byte in "日".encode():
        assert bytes([byte]) in found
    spaced = token_bytes(spaced_backend())
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
    with pytest.raises(UserError, match="use one that is byte-level or SentencePiece's"):
        token_bytes(backend)
