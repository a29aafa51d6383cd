"""Which tokens a guide allows next. Every rank that samples has a matcher of each guided sequence, tells it every token
that was chosen, and so finds the same as the others.

No clock bounds what a matcher does, but counted work, which is the same on all ranks.
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

# Of a grammar, and then of each token.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": MOST_STATES,
}
# Any token may come whose bytes keep the text one that can be completed, and not only the one that a tokenizer would
# make of what has to follow: ranks have none. The last such line of a grammar counts.
_ANY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
_LONGEST_REASON = 200  # characters
# What it says of a schema: first its place in a grammar that nobody has seen, last an option that nobody can set.
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_OPTION = re.compile(r" Enable 'coerce_one_of' option to approximate oneOf with anyOf$")
_MORE = re.compile(r"\n *(<|[0-9]+ \| )")  # behind a reason: its state, or the lines that it is about
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
    """How far the text of one sequence has come in its guide.

    shared: whether `matcher`, which is at the beginning of a text, finds things out together with others of that guide.
    """

    def __init__(self, matchers: "Matchers", guide: Guide, matcher: "LLMatcher", shared: bool) -> None:
        self._matchers = matchers
        self._guide = guide
        self._matcher = matcher
        self._shared = shared
        self._told = array("i")
        self._has_ended = False
        self._follows = False
        self._allowed_V: NDArray[np.bool_] | None = None  # once it was asked for, until the next token

    def add_one(self, token_id: int) -> None:
        """The next token of the text. One that nothing allows shows in `allowed`."""
        self._allowed_V = None
        if not self._has_ended:
            self._has_ended = token_id in self._matchers.eos_ids
            self._told.append(token_id)
            self._tell(token_id)

    def with_draft_token(self, token_id: int) -> "Matcher":
        """Return the matcher of the text with a draft token.

        If the guide does not allow the token, the text counts as ended: the token is never accepted, and whatever is
        sampled after it is dropped.
        """
        may_come = not self._has_ended and self._may_come(token_id)
        copied = Matcher(self._matchers, self._guide, self._matcher.deep_copy(), self._shared)
        copied._told, copied._has_ended, copied._follows = self._told[:], not may_come, self._follows
        copied.add_one(token_id)
        return copied

    def _may_come(self, token_id: int) -> bool:
        """Whether the row before a draft token can sample it. Asked as that row asks, because what a matcher finds may
        depend on limits."""
        try:
            return bool(self.allowed()[token_id])
        except GuideError:
            return False

    @property
    def has_ended(self) -> bool:
        """Whether the text has its end: what comes after it is dropped."""
        return self._has_ended

    def allowed(self) -> NDArray[np.bool_]:
        """allowed_V: which tokens of the whole vocabulary may come next, at least one. Raises GuideError if it cannot
        be found, or if the text can neither go on nor end."""
        if self._allowed_V is not None:
            return self._allowed_V
        allowed_V = self._mask()
        if allowed_V is None and self._shared:
            # Limits count what others have found out as well, and no text shall end because of others.
            self._shared = False
            self._matchers.forget(self._guide)
            self._matcher = self._matchers.compiled(self._guide)
            for token_id in self._told:
                self._tell(token_id)
            allowed_V = self._mask()
        if allowed_V is None:
            raise GuideError(_reason(self._matcher.get_error()))
        self._allowed_V = allowed_V
        return allowed_V

    def _tell(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._matchers.steps += 1

    def _mask(self) -> NDArray[np.bool_] | None:
        """None if it cannot be found."""
        self._matchers.steps += 1
        if self._shared and not self._follows:
            self._follows = True
            self._matchers.follow(self._guide)
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return None
        return np.unpackbits(bits, bitorder="little", count=self._matchers.vocab_size).view(np.bool_)


class Matchers:
    """Makes matchers of guides, over one vocabulary.

    steps: how often one was compiled, was told a token, or was asked what may come.
    """

    def __init__(self, table: TokenTable) -> None:
        import llguidance  # which takes a while, and is needed where somebody asks for a guide

        self.vocab_size, self.eos_ids = len(table.tokens), table.eos_ids
        self.steps = 0
        self._new = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._tokenizer = llguidance.LLTokenizer(_Words(table), eos_token=list(table.eos_ids))
        self._kept: KeptGuides[LLMatcher] = KeptGuides()

    def new(self, guide: Guide) -> Matcher:
        """At the beginning of a text. Raises UserError for what is no grammar; what else is wrong with it shows in
        `Matcher.allowed`."""
        return Matcher(self, guide, self._kept.want(guide, self.compiled).deep_copy(), shared=True)

    def compiled(self, guide: Guide) -> "LLMatcher":
        """At the beginning of a text, and with nothing in common with others. Raises UserError as `new` does."""
        found = self._new(self._tokenizer, _grammar(guide), log_level=0, limits=self._limits)
        self.steps += 1
        return found

    def follow(self, guide: Guide) -> None:
        """A text begins to follow a guide."""
        self._kept.follow(guide)

    def trim(self) -> None:
        """Keep the compiled guides that are to be kept beyond a step."""
        self._kept.trim()

    def forget(self, guide: Guide) -> None:
        """Compile it again for the next text."""
        self._kept.forget(guide)

    def check(self, guide: Guide) -> None:
        """Raise UserError if it cannot be followed from its first token on."""
        found = {guide, replace(guide, reasoning=None)}  # the answer alone, too, which comes much later
        matchers = [Matcher(self, each, self.compiled(each), shared=False) for each in found]
        try:
            for matcher in matchers:
                matcher.allowed()
        except GuideError as error:
            raise UserError(f"the {_NAMES[guide.kind]} cannot be used: {error}", "invalid_guide") from error


def _grammar(guide: Guide) -> str:
    """Return the grammar of a whole answer, as llguidance takes it. Raises UserError for what is no grammar."""
    answer = _lark(guide) + _ANY_TOKEN
    if guide.reasoning is None:
        return answer
    # Grammars side by side have rules of their own, whatever names a user's grammar gives to its rules.
    whole = guide.reasoning.lark("@answer") + _ANY_TOKEN
    return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": answer}]})


def _lark(guide: Guide) -> str:
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
    return lark


def _reason(error: str) -> str:
    """What llguidance says, as the end of a sentence."""
    said = " ".join(_MORE.split(error)[0].split())
    if said.startswith("NoExtension"):
        return "no text that the model has tokens for can follow it"
    said = _OPTION.sub(
        " Use anyOf, or alternatives that differ in the value of a required property", _PLACE.sub("", said)
    )
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
