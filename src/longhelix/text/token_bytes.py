"""The bytes that tokens stand for."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from longhelix.errors import UserError

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """By id, inside of a text, where decoders drop nothing. Raises UserError for a tokenizer of another kind."""
    spelled = _spelling(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
    added = backend.get_added_tokens_decoder()
    found = {token_id: spelled(token) for token, token_id in backend.get_vocab(with_added_tokens=False).items()}
    return found | {token_id: token.content.encode() for token_id, token in added.items()}


def _spelling(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """What makes bytes of a token, as a decoder does."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = next((step for step in steps if step["type"] in ("Replace", "Metaspace")), None)
    if spaces is None or not kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise UserError(
            "the model's tokenizer has no bytes for its tokens, which guides need: use one that is byte-level or "
            "SentencePiece's, or ask for no guide",
            "unsupported_model",
        )
    space = spaces["pattern"]["String"] if spaces["type"] == "Replace" else spaces["replacement"]

    def pieces(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    return pieces


def _byte_level(token: str) -> bytes:
    # A character that stands for no byte stands for itself, and so does all of its token.
    return bytes(map(_BYTES.__getitem__, token)) if _BYTES.keys() >= set(token) else token.encode()


def _byte_characters() -> dict[str, int]:
    """The bytes that characters of byte-level vocabularies stand for: printable ones for themselves, then from 256 on
    one for each of the others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
