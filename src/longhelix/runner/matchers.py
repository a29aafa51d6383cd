"""Which tokens a guide allows next. Every rank that samples has a matcher of each guided sequence, tells it every token
that was chosen, and so finds the same as the others.

No clock bounds what a matcher does, but counted work, which is the same on all ranks.
"""

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longhelix.errors import UserError
from longhelix.guide import Guide, TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Of a grammar, and then of each token.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 10_000,  # of 1 to 2 kB each
}
# Any token may come whose bytes keep the text one that can be completed, and not only the one that a tokenizer would
# make of what has to follow: ranks have none. The last such line of a grammar counts.
_ANY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
_LONGEST_REASON = 200  # characters
_MORE = re.compile(r"\n *(<|[0-9]+ \| )")  # behind a reason: its state, or the lines that it is about
_KNOWN_GRAMMARS = 64
_NAMES = {
    "json": "guide",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
}


class GuideError(RuntimeError):
    """A matcher cannot go on."""


class _Words:
    """A vocabulary, as llguidance takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_ids)
        self.eos_token_id = table.eos_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("no token is forced, and so no text is split into some")


class Matcher:
    """How far the text of one sequence has come in its guide."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._has_ended = False

    def add_one(self, token_id: int) -> None:
        """The next token of the text. One that nothing allows shows in `allowed`."""
        if not self._has_ended:
            self._has_ended = token_id in self._eos_ids
            self._matcher.consume_token(token_id)

    @property
    def has_ended(self) -> bool:
        """Whether the text has its end: what comes after it is dropped."""
        return self._has_ended

    def allowed(self) -> NDArray[np.bool_]:
        """allowed_V: which tokens of the whole vocabulary may come next, at least one. Raises GuideError if it cannot
        be found, or if the text can neither go on nor end."""
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed_V = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if self._matcher.is_error():
            raise GuideError(_reason(self._matcher.get_error()))
        return allowed_V


class Matchers:
    """Makes matchers of guides, over one vocabulary."""

    def __init__(self, table: TokenTable) -> None:
        import llguidance  # which takes a while, and is needed where somebody asks for a guide

        self._vocab_size, self._eos_ids = len(table.tokens), table.eos_ids
        self._new = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._tokenizer = llguidance.LLTokenizer(_Words(table), eos_token=list(table.eos_ids))
        self._grammar = lru_cache(_KNOWN_GRAMMARS)(_grammar)

    def new(self, guide: Guide) -> Matcher:
        """At the beginning of a text. Raises UserError for what is no grammar; what else is wrong with it shows in
        `Matcher.allowed`."""
        # Compiled anew, because copies share what they find out, and with it what their limits count.
        found = self._new(self._tokenizer, self._grammar(guide), log_level=0, limits=self._limits)
        return Matcher(found, self._vocab_size, self._eos_ids)

    def check(self, guide: Guide) -> None:
        """Raise UserError if it cannot be followed from its first token on."""
        matcher = self.new(guide)
        try:
            matcher.allowed()
        except GuideError as error:
            raise UserError(f"the {_NAMES[guide.kind]} cannot be used: {error}", "invalid_guide") from error


def _grammar(guide: Guide) -> str:
    """In Lark. Raises UserError for what is no grammar."""
    from llguidance import LLMatcher, grammar_from

    lark = guide.lark
    if lark is None and guide.kind == "regex":
        (found,) = json.loads(LLMatcher.grammar_from_regex(guide.text))["grammars"]
        lark = found["lark_grammar"]
    elif lark is None:
        try:
            lark = grammar_from("grammar", guide.text)
        except ValueError as error:
            raise UserError(f"the grammar cannot be used: {_reason(str(error))}", "invalid_guide") from error
    return lark + _ANY_TOKEN


def _reason(error: str) -> str:
    """What llguidance says, as the end of a sentence."""
    said = " ".join(_MORE.split(error)[0].split())
    if said.startswith("NoExtension"):
        return "no text that the model has tokens for can follow it"
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
