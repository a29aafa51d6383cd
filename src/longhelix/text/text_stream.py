"""Text from token ids that come one by one."""

import tokenizers


class TextStream:
    """Decodes a growing sequence; the pieces joined are what `Tokenizer.decode` gives for all of it."""

    # A character has at most four bytes: after this many tokens without one complete, the bytes are not text.
    _PATIENCE = 16

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend, self._skips = backend, skip_special_tokens
        added = backend.get_added_tokens_decoder() if skip_special_tokens else {}
        self._silent = {token_id for token_id, token in added.items() if token.special}
        # Decoders drop the space that begins a text, so new tokens are decoded behind those of the last piece.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The characters that this id completes, or ""."""
        if token_id in self._silent or self._backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        piece = self._pending_text()
        if not piece or (piece.endswith("\ufffd") and len(self._pending) < self._PATIENCE):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._backend.decode(self._context, self._skips)
        return piece

    def finish(self) -> str:
        """The rest; a character still incomplete comes out as U+FFFD."""
        return self._pending_text()

    def _pending_text(self) -> str:
        return self._backend.decode(self._context + self._pending, self._skips)[len(self._context_text) :]
