"""The bytes of each token."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import tokenizers

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHUNK = 1 << 13  # tokens to join at once; other threads have to wait during this time


class _Spelling(Protocol):
    """Turns a token into bytes, as a tokenizer's decoder does.

    Args:
        token: the token as the vocabulary spells it.
        is_added: whether the token was added to the vocabulary.
        begins: whether the token is the first of a text. SentencePiece's decoders remove a space at the beginning of a
            text.
    """

    def __call__(self, token: str, *, is_added: bool, begins: bool) -> bytes: ...


class TokenBytes:
    """The bytes of a tokenizer's tokens, by id. An id without a token has no bytes."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: _Spelling) -> None:
        self._backend, self._spelling = backend, spelling
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._inside = _Cache(self._spelled)

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token that is not the first of a text."""
        return self._inside[token_id]

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token at the beginning of a text."""
        return self._spelled(token_id, begins=True)

    def all_tokens(self) -> dict[int, bytes]:
        """Return the bytes of every token by id. They are the bytes that the token has after other tokens."""
        return {token_id: self._inside[token_id] for token_id in self._backend.get_vocab().values()}

    def text(self, token_ids: Sequence[int], begins: bool = True) -> str:
        """Return the text of these tokens, including special tokens.

        Each maximal sequence of bytes that is not UTF-8 becomes one U+FFFD.

        Args:
            token_ids: the tokens.
            begins: whether the tokens begin a text. If false, they continue a text.
        """
        parts: list[bytes] = []
        start = 0
        while begins and start < len(token_ids):
            parts.append(self.first(token_ids[start]))
            begins = not self._inside[token_ids[start]]
            start += 1
        for at in range(start, len(token_ids), _CHUNK):
            parts.append(b"".join(map(self._inside.__getitem__, token_ids[at : at + _CHUNK])))
        return b"".join(parts).decode("utf-8", "replace")

    def _spelled(self, token_id: int, begins: bool = False) -> bytes:
        token = self._added.get(token_id)
        if token is not None:
            return self._spelling(token, is_added=True, begins=begins)
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling(token, is_added=False, begins=begins)


class _Cache(dict[int, bytes]):
    """Bytes by token id, computed at the first access."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._make(token_id)
        return found


def token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens.

    Returns None if the decoder is neither byte-level nor SentencePiece's. With other decoders, the bytes of a token may
    depend on the tokens around it.
    """
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    spelling = _spelling(steps)
    return None if spelling is None else TokenBytes(backend, spelling)


def _spelling(steps: Sequence[Mapping[str, Any]]) -> _Spelling | None:
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _byte_level
    # Steps after Fuse process the whole text. The only such step that is supported removes a space at the beginning.
    at = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    each, whole = steps[:at], steps[at + 1 :]
    if not each or not all(map(_is_spelled, each)) or not all(map(_strips_one, whole)) or len(whole) > 1:
        return None
    dropped = b"".join(step["content"].encode() for step in whole)
    return partial(_sentencepiece, each, dropped)


def _is_spelled(step: Mapping[str, Any]) -> bool:
    return step["type"] in ("Metaspace", "ByteFallback") or (step["type"] == "Replace" and "String" in step["pattern"])


def _strips_one(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Strip" and (step["start"], step["stop"]) == (1, 0)


def _sentencepiece(
    steps: Sequence[Mapping[str, Any]], dropped: bytes, token: str, *, is_added: bool, begins: bool
) -> bytes:
    """Return the bytes of a token for a SentencePiece decoder.

    steps: the decoder's steps before `Fuse`. dropped: bytes to remove from the beginning of a text.
    """
    for step in steps:
        if step["type"] == "ByteFallback":
            byte = _BYTE.fullmatch(token)
            if byte:
                return bytes([int(byte[1], 16)]).removeprefix(dropped if begins else b"")
        elif step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        else:
            drops = begins and step["prepend_scheme"] != "never"
            token = token.replace(step["replacement"], "" if drops else " ")
    return token.encode().removeprefix(dropped if begins else b"")


def _byte_level(token: str, *, is_added: bool, begins: bool) -> bytes:
    # A token is plain text if one of its characters represents no byte.
    stands_for_itself = is_added or not _BYTES.keys() >= set(token)
    return token.encode() if stands_for_itself else bytes(map(_BYTES.__getitem__, token))


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of byte-level vocabularies represents.

    Printable bytes are represented by their own character. The other bytes are represented by characters from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
