"""Determines which tokens a guide allows next.

Every rank that samples has a matcher of each guided sequence, and feeds it every chosen token. So all ranks allow the
same tokens. The limits of a matcher count work instead of time, because counts are the same on all ranks.
"""

import json
import re
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longhelix.errors import UserError
from longhelix.scheduler.guide import MOST_STATES, Guide, KeptGuides, TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Limits for a grammar as a whole, then for each token.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": MOST_STATES,
}
# Allow every token whose bytes keep the text completable, and not only the token that a tokenizer would choose, because
# ranks have no tokenizer. The last such line of a grammar counts.
_ANY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
_LONGEST_REASON = 200  # characters
# Parts of llguidance's messages that users cannot act on: a place in an internal grammar, and an unavailable option.
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_OPTION = re.compile(r" Enable 'coerce_one_of' option to approximate oneOf with anyOf$")
_MORE = re.compile(r"\n *(<|[0-9]+ \| )")  # what follows a reason: internal state, or source lines
_NAMES = {
    "json": "guide",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
}


class GuideError(RuntimeError):
    """A matcher cannot compute the allowed tokens."""


class _Words:
    """A vocabulary in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_ids)
        self.eos_token_id = table.eos_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("no token is forced, and so no text is split into some")


class Matcher:
    """Position of one sequence's text in its guide.

    Args:
        matcher: llguidance's matcher at the start of a text.
        shared: Whether `matcher` shares cached states with other matchers of the guide.
    """

    def __init__(self, matchers: "Matchers", guide: Guide, matcher: "LLMatcher", shared: bool) -> None:
        self._matchers = matchers
        self._guide = guide
        self._matcher = matcher
        self._shared = shared
        self._token_ids = array("i")
        self._has_ended = False
        self._is_following = False
        self._allowed_V: NDArray[np.bool_] | None = None  # cached until the next token

    def add_one(self, token_id: int) -> None:
        """Add the next token of the text. If the guide does not allow it, `allowed` raises GuideError."""
        self._allowed_V = None
        if not self._has_ended:
            self._has_ended = token_id in self._matchers.eos_ids
            self._token_ids.append(token_id)
            self._consume(token_id)

    def with_draft_token(self, token_id: int) -> "Matcher":
        """Return the matcher of the text with a draft token.

        If the guide does not allow the token, the text counts as ended: the token is never accepted, and tokens sampled
        after it are dropped.
        """
        may_come = not self._has_ended and self._is_allowed(token_id)
        copied = Matcher(self._matchers, self._guide, self._matcher.deep_copy(), self._shared)
        copied._token_ids, copied._has_ended, copied._is_following = (
            self._token_ids[:],
            not may_come,
            self._is_following,
        )
        copied.add_one(token_id)
        return copied

    def _is_allowed(self, token_id: int) -> bool:
        """Return whether the row before a draft token can sample it.

        Computed exactly as for that row, because results may depend on limits.
        """
        try:
            return bool(self.allowed()[token_id])
        except GuideError:
            return False

    @property
    def has_ended(self) -> bool:
        """Whether the text has ended. Later tokens are dropped."""
        return self._has_ended

    def allowed(self) -> NDArray[np.bool_]:
        """Return allowed_V: whether each token of the vocabulary may come next. At least one may.

        Raises:
            GuideError: A limit was reached, or the text can neither continue nor end.
        """
        if self._allowed_V is not None:
            return self._allowed_V
        allowed_V = self._mask()
        if allowed_V is None and self._shared:
            # Shared states count toward limits, but no text may end because of others. So retry with states of its own.
            self._shared = False
            self._matchers.forget(self._guide)
            self._matcher = self._matchers.compiled(self._guide)
            for token_id in self._token_ids:
                self._consume(token_id)
            allowed_V = self._mask()
        if allowed_V is None:
            raise GuideError(_reason(self._matcher.get_error()))
        self._allowed_V = allowed_V
        return allowed_V

    def _consume(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._matchers.steps += 1

    def _mask(self) -> NDArray[np.bool_] | None:
        """Compute `allowed`. Returns None if the matcher has failed."""
        self._matchers.steps += 1
        if self._shared and not self._is_following:
            self._is_following = True
            self._matchers.follow(self._guide)
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return None
        return np.unpackbits(bits, bitorder="little", count=self._matchers.vocab_size).view(np.bool_)


class Matchers:
    """Makes matchers of guides, over one vocabulary.

    Attributes:
        steps: Number of compiled guides, consumed tokens and computed masks.
    """

    def __init__(self, table: TokenTable) -> None:
        import llguidance  # slow, and only needed for guides

        self.vocab_size, self.eos_ids = len(table.tokens), table.eos_ids
        self.steps = 0
        self._new = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._tokenizer = llguidance.LLTokenizer(_Words(table), eos_token=list(table.eos_ids))
        self._compiled_guides: KeptGuides[LLMatcher] = KeptGuides()

    def new(self, guide: Guide) -> Matcher:
        """Return a matcher at the start of a text.

        Raises UserError if the guide is not a valid grammar. Other errors are raised by `Matcher.allowed`.
        """
        return Matcher(self, guide, self._compiled_guides.want(guide, self.compiled).deep_copy(), shared=True)

    def compiled(self, guide: Guide) -> "LLMatcher":
        """Return llguidance's matcher at the start of a text, without shared states. Raises UserError as `new` does."""
        matcher = self._new(self._tokenizer, _grammar(guide), log_level=0, limits=self._limits)
        self.steps += 1
        return matcher

    def follow(self, guide: Guide) -> None:
        """Note that a text begins to follow a guide."""
        self._compiled_guides.follow(guide)

    def trim(self) -> None:
        """Drop the compiled guides that are not kept beyond a step."""
        self._compiled_guides.trim()

    def forget(self, guide: Guide) -> None:
        """Drop a compiled guide, so that the next text compiles it again."""
        self._compiled_guides.forget(guide)

    def check(self, guide: Guide) -> None:
        """Raise UserError if no text can follow the guide."""
        guides = {guide, replace(guide, reasoning=None)}  # also the answer without reasoning, which comes much later
        matchers = [Matcher(self, variant, self.compiled(variant), shared=False) for variant in guides]
        try:
            for matcher in matchers:
                matcher.allowed()
        except GuideError as error:
            raise UserError(f"the {_NAMES[guide.kind]} cannot be used: {error}", "invalid_guide") from error


def _grammar(guide: Guide) -> str:
    """Return the grammar of a whole answer in llguidance's format. Raises UserError if the guide is invalid."""
    answer = _lark(guide) + _ANY_TOKEN
    if guide.reasoning is None:
        return answer
    # Separate grammars cannot clash, even if a user's grammar has rules of the same names.
    full_text = guide.reasoning.lark("@answer") + _ANY_TOKEN
    return json.dumps({"grammars": [{"lark_grammar": full_text}, {"name": "answer", "lark_grammar": answer}]})


def _lark(guide: Guide) -> str:
    """Return the guide as a Lark grammar. Raises UserError if it is invalid."""
    from llguidance import LLMatcher, grammar_from

    lark = guide.lark
    if lark is None and guide.kind == "regex":
        (lark_grammar,) = json.loads(LLMatcher.grammar_from_regex(guide.text))["grammars"]
        lark = lark_grammar["lark_grammar"]
    elif lark is None:
        try:
            lark = grammar_from("grammar", guide.text)
        except ValueError as error:
            raise UserError(f"the grammar cannot be used: {_reason(str(error))}", "invalid_guide") from error
    return lark


def _reason(error: str) -> str:
    """Turn an error of llguidance into the end of a sentence."""
    reason = " ".join(_MORE.split(error)[0].split())
    if reason.startswith("NoExtension"):
        return "no text that the model has tokens for can follow it"
    reason = _OPTION.sub(
        " Use anyOf, or alternatives that differ in the value of a required property", _PLACE.sub("", reason)
    )
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
