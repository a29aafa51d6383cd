"""Guides, which restrict the text of an answer, and the table of token bytes that ranks need to apply them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from longhelix.errors import UserError
from longhelix.values import items, one_of, text

KINDS = ("json", "json_schema", "regex", "grammar", "choice")
LONGEST_GUIDE = 131_072  # bytes of UTF-8
_MOST_CHOICES = 10_000
_DEEPEST = 64  # levels of a schema
# Whitespace allowed between two tokens of JSON. It is bounded because a confused model would write nothing else.
_BETWEEN = r" |\r?\n[ \t]{0,40}"
# A compiled schema of 1.2 KB takes 160 KiB, one of 10 KB takes 570 KiB, one of 104 KB takes 6 MiB, and 8,000 choices
# of 87 KB take 8 MiB (resident memory, vocabulary of 49,152 tokens). A full cache takes about 0.2 GiB.
_MOST_KEPT, _MOST_KEPT_CHARACTERS = 256, 1 << 21
# Each text that follows a guide adds states to its automaton. They stay until the guide is evicted.
MOST_STATES, STATE_BYTES = 10_000, 2048  # 650 to 2,000 bytes were measured
MOST_STATES_BYTES = 1 << 29  # of all cached guides

# String formats that guides enforce. Other formats have no effect: JSON Schema treats them as annotations.
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
_DATA = frozenset({"const", "default", "enum", "examples"})  # keywords with values that are not schemas
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around the reasoning with which an answer may begin.

    An answer is free text up to `end`, then at most two line ends, then what the user wants.
    """

    begin: str
    end: str
    begin_id: int | None = None  # the special token that is the tag; None if the tag is text
    end_id: int | None = None
    is_open: bool = False  # the prompt ends inside the reasoning, so the answer does not have to open it

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id in (self.begin_id, self.end_id) if token_id is not None)

    def lark(self, answer: str) -> str:
        """Return a grammar of reasoning followed by the rule `answer`. Without an open prompt, the reasoning may be
        missing."""
        begin = json.dumps(self.begin) if self.begin_id is None else f"<[{self.begin_id}]>"
        tag = re.escape(self.end).replace("/", r"\/")
        rules = [f"start: reasoning {answer}" if self.is_open else f"start: ({begin} reasoning)? {answer}"]
        rules.append(r"reasoning: text /\n{0,2}/")
        if self.end_id is None:
            rules.append(f"text[lazy]: /(?s:.*){tag}/")
        else:  # a special token has no text, but the model may also spell the tag
            rules.append(f"text: spelled | FREE <[{self.end_id}]>")
            rules.append(f"spelled[lazy]: /(?s:.*){tag}/")
            rules.append(f"FREE: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/")
        return "\n".join(rules)


@dataclass(frozen=True)
class Guide:
    """Restricts the text of an answer to a JSON schema, a regular expression, a grammar or a list of choices.

    Attributes:
        kind: "json" (any JSON object), "json_schema", "regex", "grammar" or "choice".
        text: The JSON schema, the regular expression, the grammar, or a JSON list of strings. Empty for "json".
        reasoning: Tags around reasoning that may come before the guided text. None allows no reasoning.

    A regular expression uses Rust's syntax, without look-ahead and look-behind, and must match the whole text. A
    grammar is Lark, in llguidance's dialect, or GBNF. Whether a guide can be compiled is checked when it is used.

    Raises:
        UserError: the kind is unknown, or the text is invalid for it.
    """

    kind: str
    text: str = ""
    reasoning: ReasoningTags | None = None

    def __post_init__(self) -> None:
        """Check the values and convert them to plain Python types."""
        kind, given = one_of("the kind of a guide", self.kind, KINDS), text("a guide", self.text)
        size = len(given.encode())
        if size > LONGEST_GUIDE:
            raise UserError(f"a guide has {size} bytes: give at most {LONGEST_GUIDE}", "guide_too_large")
        if kind == "json" and given:
            raise UserError("a guide of kind json takes no text: leave it out, or use the kind json_schema")
        if kind in ("regex", "grammar") and not given:
            raise UserError(f"a guide of kind {kind} is empty: give a {kind}")
        if kind == "json_schema":
            _check_schema(_parsed("a JSON schema", given))
        if kind == "choice":
            _check_choices(_parsed("a list of choices", given))
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", given)

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | str) -> "Guide":
        """Return a guide for JSON that matches a schema, given as a mapping or as JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else _dumped("a JSON schema", schema))

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "Guide":
        """Return a guide for exactly one of these strings."""
        return cls("choice", _dumped("a list of choices", items("choices", choices, _MOST_CHOICES, "strings")))

    @property
    def lark(self) -> str | None:
        """The guide as a Lark grammar, without reasoning; None for regular expressions and grammars."""
        match self.kind:
            case "json":
                return f"start: {in_lark({'type': 'object'})}"
            case "json_schema":
                return f"start: {in_lark(json.loads(self.text))}"
            case "choice":
                return "start: " + " | ".join(map(json.dumps, json.loads(self.text)))
        return None


class TokenTable(msgspec.Struct, frozen=True):
    """The bytes of each token of a vocabulary."""

    tokens: tuple[bytes, ...]  # by token id; empty for tokens that no text can have
    special_ids: tuple[int, ...]  # special tokens, which are not text; their bytes are their names
    eos_ids: tuple[int, ...]  # tokens that end an answer


class KeptGuides(Generic[_Made]):
    """Cache of compiled guides, least recently used first.

    `trim` drops guides until at most 256 are left, with at most 2 Mi characters and automata that can grow to at most
    0.5 GiB. The last guide always stays. Between two calls of `trim` the cache only grows, so guides of one step never
    evict each other.

    Two caches that receive the same calls in the same order keep the same guides. So the scheduler knows which guides
    the ranks have compiled.
    """

    def __init__(self) -> None:
        self._kept: dict[Guide, _Made] = {}  # least recently used first
        self._followed: set[Guide] = set()
        self._characters = self._states_bytes = 0

    def __contains__(self, guide: Guide) -> bool:
        return guide in self._kept

    def want(self, guide: Guide, make: Callable[[Guide], _Made]) -> _Made:
        """Return what `make` returned for this guide, calling it if the guide is not cached."""
        if guide in self._kept:
            made = self._kept.pop(guide)
        else:
            made = make(guide)
            self._characters += len(guide.text)
        self._kept[guide] = made
        return made

    def follow(self, guide: Guide) -> None:
        """Count the most memory that the automaton of a cached guide may take, because a text now follows it."""
        if guide in self._kept and guide not in self._followed:
            self._followed.add(guide)
            self._states_bytes += _most_states_bytes(guide)

    def trim(self) -> None:
        """Drop the least recently used guides until the cache is within its limits."""
        while len(self._kept) > _MOST_KEPT or (self._is_large and len(self._kept) > 1):
            self.forget(next(iter(self._kept)))

    @property
    def _is_large(self) -> bool:
        return self._characters > _MOST_KEPT_CHARACTERS or self._states_bytes > MOST_STATES_BYTES

    def forget(self, guide: Guide) -> None:
        if guide in self._kept:
            del self._kept[guide]
            self._characters -= len(guide.text)
        if guide in self._followed:
            self._followed.remove(guide)
            self._states_bytes -= _most_states_bytes(guide)


def _most_states_bytes(guide: Guide) -> int:
    """Upper bound of the memory of the automaton's states. Choices have at most one state per character."""
    return STATE_BYTES * (min(MOST_STATES, len(guide.text)) if guide.kind == "choice" else MOST_STATES)


def in_lark(schema: Mapping[str, Any]) -> str:
    """Return a schema as an expression inside a rule of a Lark grammar."""
    # Comes last to override such a key in a user's schema.
    return "%json " + json.dumps(_enforced(schema) | {"x-guidance": {"whitespace_pattern": _BETWEEN}})


def _enforced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the formats that guides do not enforce."""
    return {
        name: value if name in _DATA else _enforced_inside(value, by_name=name in _BY_NAME)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _enforced_inside(value: Any, by_name: bool) -> Any:
    """Do the same for a keyword's value: a schema, a list of schemas, or schemas by name."""
    if isinstance(value, list):
        return [_enforced_inside(inner, by_name=False) for inner in value]
    if not isinstance(value, dict):
        return value
    if by_name:
        return {name: _enforced_inside(inner, by_name=False) for name, inner in value.items()}
    return _enforced(value)


def _parsed(name: str, given: str) -> Any:
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:  # a number with too many digits raises a plain ValueError
        raise UserError(f"{name} is not JSON ({error}): correct it") from error


def _dumped(name: str, value: object) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be written as JSON ({error}): correct it") from error


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict):
        raise UserError('a JSON schema is not an object: give one such as {"type": "object"}')
    level: list[Any] = [schema]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise UserError(f"a JSON schema is nested deeper than {_DEEPEST} levels: make it flatter", "guide_too_large")


def _check_choices(choices: object) -> None:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise UserError("choices is not a list of strings: give at least one string, and no empty ones")
    if len(choices) > _MOST_CHOICES:
        raise UserError(f"there are {len(choices)} choices: give at most {_MOST_CHOICES}", "guide_too_large")
