"""Guides: what the text of an answer has to be, and what tokens stand for, by which ranks know it."""

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
# What stands between two tokens of JSON: without bounds a model that has lost its way writes nothing else.
_BETWEEN = r" |\r?\n[ \t]{0,40}"
# Compiled, a schema of 1.2 KB takes 160 KiB, one of 10 KB 570 KiB, one of 104 KB 6 MiB, and 8,000 choices of 87 KB take
# 8 MiB (resident memory, over 49,152 tokens). So all that is kept takes about 0.2 GiB when it has been compiled.
_MOST_KEPT, _MOST_KEPT_CHARACTERS = 256, 1 << 21
# A text that follows a guide adds states to its automaton, which stay as long as the guide is kept.
MOST_STATES, STATE_BYTES = 10_000, 2048  # 650 to 2,000 bytes were measured
MOST_STATES_BYTES = 1 << 29  # of all guides that are kept

# Formats of strings that guides enforce. Others have no effect: JSON Schema has them as notes.
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
_DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are no schemas
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
    """What the text of an answer is: a JSON object ("json"); a JSON value that a schema allows ("json_schema", `text`
    has it); text that a regular expression matches as a whole ("regex", in the syntax of Rust, which looks neither
    ahead nor behind); of a grammar ("grammar": Lark, as llguidance has it, or GBNF); one of some strings ("choice", a
    JSON list of them). reasoning: the tags around what may come before that text.

    Raises UserError for what is none of these; whether it can be compiled is found later.
    """

    kind: str
    text: str = ""
    reasoning: ReasoningTags | None = None

    def __post_init__(self) -> None:
        kind, given = one_of("the kind of a guide", self.kind, KINDS), text("a guide", self.text)
        size = len(given.encode())
        if size > LONGEST_GUIDE:
            raise UserError(f"a guide has {size} bytes: give at most {LONGEST_GUIDE}", "guide_too_large")
        if kind == "json" and given:
            raise UserError("a guide of kind json has a text: leave it out, or give a json_schema")
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
        """JSON that a schema allows; the schema as an object or as JSON."""
        return cls("json_schema", schema if isinstance(schema, str) else _dumped("a JSON schema", schema))

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> "Guide":
        """One of some strings."""
        return cls("choice", _dumped("a list of choices", items("choices", choices, _MOST_CHOICES, "strings")))

    @property
    def lark(self) -> str | None:
        """The same as a grammar in Lark, where its kind can be written as one here; without the reasoning."""
        match self.kind:
            case "json":
                return f"start: {in_lark({'type': 'object'})}"
            case "json_schema":
                return f"start: {in_lark(json.loads(self.text))}"
            case "choice":
                return "start: " + " | ".join(map(json.dumps, json.loads(self.text)))
        return None


class TokenTable(msgspec.Struct, frozen=True):
    """What each token id of a vocabulary stands for: its bytes, empty where it stands for nothing that a text can have.

    special_ids: those that stand for no text but mark something, named by their bytes. eos_ids: those that end one.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class KeptGuides(Generic[_Made]):
    """Cache of compiled guides, least recently used first.

    `trim` drops guides until at most 256 are left, with at most 2 Mi characters and automata that can grow to at most
    0.5 GiB. The last guide always stays. Between two calls of `trim` the cache only grows, so guides of one step never
    evict each other.

    Whoever is told the same guides in the same order keeps the same: so the scheduler knows what ranks have compiled.
    """

    def __init__(self) -> None:
        self._kept: dict[Guide, _Made] = {}  # in the order in which they were last wanted
        self._followed: set[Guide] = set()
        self._characters = self._states_bytes = 0

    def __contains__(self, guide: Guide) -> bool:
        return guide in self._kept

    def want(self, guide: Guide, make: Callable[[Guide], _Made]) -> _Made:
        """What `make` has made of it, now or before."""
        if guide in self._kept:
            made = self._kept.pop(guide)
        else:
            made = make(guide)
            self._characters += len(guide.text)
        self._kept[guide] = made
        return made

    def follow(self, guide: Guide) -> None:
        """A text follows a guide, if it is kept, and may add to its automaton as many states as that can have."""
        if guide in self._kept and guide not in self._followed:
            self._followed.add(guide)
            self._states_bytes += _most_states_bytes(guide)

    def trim(self) -> None:
        """Keep no more than is to be kept."""
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
    """Memory that the states of its automaton take at most. Choices have no more states than characters."""
    return STATE_BYTES * (min(MOST_STATES, len(guide.text)) if guide.kind == "choice" else MOST_STATES)


def in_lark(schema: Mapping[str, Any]) -> str:
    """A schema inside of a rule of a grammar."""
    # Last, because a schema from outside may have such a key itself.
    return "%json " + json.dumps(_enforced(schema) | {"x-guidance": {"whitespace_pattern": _BETWEEN}})


def _enforced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without formats that are not enforced."""
    return {
        name: value if name in _DATA else _enforced_inside(value, by_name=name in _BY_NAME)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _enforced_inside(value: Any, by_name: bool) -> Any:
    """The same of what a keyword has: a schema, a list of schemas, or schemas by their names."""
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
    except (ValueError, RecursionError) as error:  # numbers of too many digits are other ValueErrors
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
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise UserError("choices are no list of strings: give at least one, none of them empty")
    if len(choices) > _MOST_CHOICES:
        raise UserError(f"there are {len(choices)} choices: give at most {_MOST_CHOICES}", "guide_too_large")
