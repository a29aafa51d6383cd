"""The bytes that tokens stand for."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import tokenizers

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHUNK = 1 << 13  # tokens that are joined at once: other threads wait meanwhile


class _Spelling(Protocol):
    """Turns a token into bytes, as a decoder does. is_added: it was added to the vocabulary. begins: a text begins with
    it; SentencePiece's decoders drop a blank there."""

    def __call__(self, token: str, *, is_added: bool, begins: bool) -> bytes: ...


class TokenBytes:
    """The bytes of a tokenizer's tokens, by id. Ids that are no tokens have none."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: _Spelling) -> None:
        self._backend, self._spelling = backend, spelling
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._inside = _Cache(self._spelled)

    def __getitem__(self, token_id: int) -> bytes:
        """What the token stands for inside of a text."""
        return self._inside[token_id]

    def first(self, token_id: int) -> bytes:
        """What the token stands for at the beginning of a text."""
        return self._spelled(token_id, begins=True)

    def everything(self) -> dict[int, bytes]:
        """The bytes of all tokens inside of a text."""
        return {token_id: self._inside[token_id] for token_id in self._backend.get_vocab().values()}

    def text(self, token_ids: Sequence[int], begins: bool = True) -> str:
        """The text of these tokens, special ones included. Each maximal sequence of bytes that is no UTF-8 becomes one
        U+FFFD. begins: the text starts with them, and does not continue another one."""
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
    """Bytes by token id, made when they are first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._make(token_id)
        return found


def token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """None for a tokenizer whose decoder is neither byte-level nor SentencePiece's: its tokens do not stand for bytes
    of their own."""
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    spelling = _spelling(steps)
    return None if spelling is None else TokenBytes(backend, spelling)


def _spelling(steps: Sequence[Mapping[str, Any]]) -> _Spelling | None:
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _byte_level
    # What comes after Fuse sees the whole text, and only the blank that begins it may be dropped there.
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
    """steps: those of a decoder that come before `Fuse`. dropped: what a text does not begin with."""
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
    # A character that stands for no byte stands for itself, and so does all of its token.
    stands_for_itself = is_added or not _BYTES.keys() >= set(token)
    return token.encode() if stands_for_itself else bytes(map(_BYTES.__getitem__, token))


def _byte_characters() -> dict[str, int]:
    """The bytes that characters of byte-level vocabularies stand for: printable ones for themselves, then from 256 on
    one for each of the others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
