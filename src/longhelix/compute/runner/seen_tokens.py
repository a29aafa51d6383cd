"""The set of tokens that a sequence contains, for its repetition penalty."""

import numpy as np
import torch

_WORDS_BITS = 512  # bits that kernels read at once


class SeenTokens:
    """A bit for each token of `vocabulary`, in words_W (int32). The lowest bit is the first token."""

    def __init__(self, vocabulary: range) -> None:
        self._begin, self._end = vocabulary.start, vocabulary.stop
        self.words_W = torch.zeros(-(-len(vocabulary) // _WORDS_BITS) * _WORDS_BITS // 32, dtype=torch.int32)
        self._bytes = self.words_W.numpy().view(np.uint8)

    def add(self, token_ids: np.ndarray) -> None:
        is_local = (token_ids >= self._begin) & (token_ids < self._end)
        is_seen = np.zeros(8 * len(self._bytes), np.bool_)
        is_seen[token_ids[is_local] - self._begin] = True
        self._bytes |= np.packbits(is_seen, bitorder="little")

    def with_token(self, token_id: int) -> "SeenTokens":
        """Return a copy with one more token."""
        copied = SeenTokens(range(self._begin, self._end))
        copied._bytes[:] = self._bytes
        copied.add_one(token_id)
        return copied

    def add_one(self, token_id: int) -> None:
        if self._begin <= token_id < self._end:
            byte, bit = divmod(token_id - self._begin, 8)
            self._bytes[byte] |= 1 << bit
