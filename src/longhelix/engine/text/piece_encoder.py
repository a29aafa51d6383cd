"""SentencePiece tokenization, with the same results as llama.cpp."""

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

SPACE = "▁"
_KNOWN_WORDS = 1 << 16
_LONGEST_KNOWN_WORD = 32  # characters
_PLACE_BITS = 30
_PLACE = (1 << _PLACE_BITS) - 1


class PieceEncoder:
    """Joins neighbouring pieces into longer pieces. The pair with the best score is joined first.

    If several pairs have the best score, the leftmost pair is joined first. The `tokenizers` library cannot do this,
    because it merges pairs by rank and every pair has a unique rank.

    Args:
        vocabulary: ids of all tokens.
        scores: score of each piece.
        added: tokens to find in a text before it is split.
        unknown: ids for a character that has neither a piece nor byte tokens.
        starts_with_space: whether to put a space before the text, and before the text after each added token.
        begin: ids to put before a prompt.
        end: ids to put after a prompt.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        scores: Mapping[str, float],
        added: Collection[str],
        *,
        unknown: Sequence[int] = (),
        starts_with_space: bool = True,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
    ) -> None:
        self._vocabulary, self._unknown = vocabulary, unknown
        order = {score: rank for rank, score in enumerate(sorted(set(scores.values()), reverse=True))}
        self._ranks = {piece: order[score] for piece, score in scores.items()}
        self._added = frozenset(added)
        self._added_lengths = sorted({len(token) for token in added}, reverse=True)
        initials = "".join({token[:1] for token in added})
        self._initial = re.compile(f"[{re.escape(initials)}]" if initials else r"(?!)")
        self._prefix = SPACE if starts_with_space else ""
        self._begin, self._end = begin, end
        self._inside_pieces = {pair for piece in scores for pair in pairwise(piece)}
        self._known_word = lru_cache(_KNOWN_WORDS)(self._word_ids)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. See `Encoder`."""
        found = list(self._begin) if add_special_tokens else []
        for segment, is_added in self._segments(text):
            if is_added:
                found.append(self._vocabulary[segment])
                continue
            for word in self._words(self._prefix + segment.replace(" ", SPACE)):
                found += self._known_word(word) if len(word) <= _LONGEST_KNOWN_WORD else self._word_ids(word)
        return found + list(self._end) if add_special_tokens else found

    def parts(self, text: str) -> list[str]:
        """Return the part of a text that each id represents. See `Encoder`."""
        found = [""] * len(self._begin)
        for segment, is_added in self._segments(text):
            if is_added:
                found.append(segment)
                continue
            at = -len(self._prefix)
            for word in self._words(self._prefix + segment.replace(" ", SPACE)):
                for piece in self._pieces(word):
                    end = at + len(piece)
                    found += [""] * (len(self._piece_ids(piece)) - 1) + [segment[max(at, 0) : end]]
                    at = end
        return found + [""] * len(self._end)

    def _segments(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the added tokens in a text, and the text between them. The flag is true for an added token.

        If several added tokens begin at a position, the longest one is used.
        """
        start = at = 0
        while mark := self._initial.search(text, at):
            at = mark.start()
            token = next((text[at : at + n] for n in self._added_lengths if text[at : at + n] in self._added), None)
            if token is None:
                at += 1
                continue
            if start < at:
                yield text[start:at], False
            yield token, True
            start = at = at + len(token)
        if start < len(text):
            yield text[start:], False

    def _words(self, text: str) -> Iterator[str]:
        """Yield the words of a text.

        The text is cut between two characters if no piece contains this pair of characters. No piece can span a cut.
        """
        start = 0
        for at, pair in enumerate(pairwise(text), 1):
            if pair not in self._inside_pieces:
                yield text[start:at]
                start = at
        yield text[start:]

    def _word_ids(self, word: str) -> list[int]:
        return [token_id for piece in self._pieces(word) for token_id in self._piece_ids(piece)]

    def _piece_ids(self, piece: str) -> Sequence[int]:
        if piece in self._ranks:
            return (self._vocabulary[piece],)
        found = [self._vocabulary.get(f"<0x{byte:02X}>") for byte in piece.encode()]
        return self._unknown if None in found else found

    def _pieces(self, word: str) -> Iterator[str]:
        ranks, length = self._ranks, len(word)
        # ends[i] is the end of the piece that begins at i. begins[i] is the beginning of the piece that ends at i.
        ends, begins = array("i"), array("i", [-1])
        unions: list[int] = []  # heap of pairs; rank, start and end are packed into one integer to save memory

        def offer(start: int, end: int) -> None:
            rank = ranks.get(word[start:end])
            if rank is not None:
                heappush(unions, (rank << 2 * _PLACE_BITS) + (start << _PLACE_BITS) + end)

        for at in range(length):
            ends.append(at + 1)
            begins.append(at)
            if at:
                offer(at - 1, at + 1)
        while unions:
            union = heappop(unions)
            start, end = (union >> _PLACE_BITS) & _PLACE, union & _PLACE
            middle = ends[start]
            if not start < middle < end or ends[middle] != end:
                continue  # one of the two pieces is already part of another piece
            ends[start], ends[middle], begins[end] = end, 0, start
            if start:
                offer(begins[start], end)
            if end < length:
                offer(start, ends[end])
        at = 0
        while at < length:
            yield word[at : ends[at]]
            at = ends[at]
