"""Finds tool calls in a model's answer."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from longhelix.engine.text.stop_strings import overlap
from longhelix.scheduler.guide import in_lark


@dataclass(frozen=True)
class ToolForm:
    """How a model writes a tool call: a JSON object with the function's "name" and arguments, between two marks."""

    begin: str  # mark before a call; if empty, an answer consists of calls from its first character on, or has none
    end: str  # mark after a call
    arguments: str  # key of the arguments in the JSON object
    separator: str  # text between two calls

    def lark(self, functions: Mapping[str, Mapping[str, Any]], several: bool) -> str:
        """Return a Lark grammar of answers that are one call, or `several`.

        functions: the JSON schema of each function's arguments, by name.
        """
        rules = [f"start: call ({json.dumps(self.separator)} call)*" if several else "start: call"]
        marks = (f"{self.begin}\n", f"\n{self.end}") if self.begin else ("", "")
        rules.append("call: {} one {}".format(*map(json.dumps, marks)))
        rules.append("one: " + " | ".join(f"f{place}" for place in range(len(functions))))
        for place, (name, schema) in enumerate(functions.items()):
            before = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
            # Each schema is one of its own, so that references in it find what they mean.
            rules.append(f"f{place}: {json.dumps(before)} a{place} {json.dumps('}')}")
            rules.append(f"a{place}: {in_lark({'type': 'object'} | dict(schema))}")
        return "\n".join(rules)


HERMES = ToolForm("<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA = ToolForm("", "", "parameters", "; ")


def form_of(template: str) -> ToolForm | None:
    """Return the form of tool calls that a chat template shows its model; None if it is unknown."""
    if HERMES.begin in template:
        # Others write their calls as XML between the same marks.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    return LLAMA if '"parameters": ' in template and '{"name": ' in template else None


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The start of a tool call."""

    place: int  # index of the call in the answer
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON of a call's arguments."""

    place: int  # index of the call in the answer
    text: str


Piece = ContentDelta | ToolCallStart | Arguments


class ToolCalls:
    """Splits an answer that comes piece by piece into text and tool calls.

    Text that looks like a call but is not one stays text. The result does not depend on how the answer is cut into
    pieces. Each character is read once, or a few times at most.

    Args:
        form: how the model writes calls.
        names: names of the functions that may be called.
        several: whether calls may follow the first one. If not, everything after the first call is dropped.
    """

    def __init__(self, form: ToolForm, names: Collection[str], several: bool = True) -> None:
        self._form, self._several = form, several
        self._head = _head(form, names)
        self._others = frozenset({'"type', '"id', f'"{form.arguments}'})  # that it may begin with in another order
        self._between_calls = None if form.begin else " \t\r\n;"  # beside blanks
        self._held = ""
        self._in: Callable[[list[Piece]], bool] = self._text if form.begin else self._first
        self._num_calls = 0
        self._before = ""  # of a call that may begin: given back as text if it is none
        self._has_said = False  # something since the last call
        self._at = self._num_read = 0  # how far a call was read, in what is held and in tokens of its head
        self._name = ""
        self._json = _Scanner()

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the answer. Returns what it completes."""
        self._held += text
        found: list[Piece] = []
        while self._in(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """Return the text that was held back. Call it at the end of the answer."""
        held, self._held = self._held, ""
        if self._in in (self._call, self._whole):
            held = self._before + held
        elif self._in == self._behind or (self._is_behind_calls and not held.strip(self._between_calls)):
            held = ""
        return [ContentDelta(held)] if held else []

    # Where the answer is. Each takes what it can of the text that is held, and says whether another may take more.

    def _first(self, found: list[Piece]) -> bool:
        begun = self._held.lstrip()
        if begun:
            self._in = self._rest
            if begun[0] == "{":
                self._begin_call("", self._held)
        return bool(begun)

    def _rest(self, found: list[Piece]) -> bool:
        if self._held:
            self._say(self._held, found)
            self._held = ""
        return False

    def _text(self, found: list[Piece]) -> bool:
        begin = self._form.begin
        before, mark, behind = self._held.partition(begin)
        # Blanks that end it may come before a call, of which they are no part.
        safe = (before if mark else before[: len(before) - overlap(before, begin)]).rstrip()
        if safe:
            self._say(safe, found)
        if mark:
            self._begin_call(before[len(safe) :] + mark, behind)
        else:
            self._held = before[len(safe) :]
        return bool(mark)

    def _call(self, found: list[Piece]) -> bool:
        """Up to its arguments, in the order that models are shown."""
        token = _TOKEN.match(self._held, self._at)
        if token is None and _BEGUN.fullmatch(self._held, self._at):
            return False
        read = "" if token is None else token[1] or _unquoted(token[2])
        if read not in self._head[self._num_read]:
            # In another order only the whole of it tells.
            if self._num_read in (4, 5) or (self._num_read == 1 and read in self._others):
                self._in, self._json, self._at = self._whole, _Scanner(), 0
            else:
                self._no_call(found)
            return True
        assert token is not None
        self._at, self._num_read = token.end(), self._num_read + 1
        if self._num_read == 4:
            self._name = read[1:]
        if self._num_read == len(self._head):
            self._named(self._name, found)
            self._in, self._json, self._held = self._arguments, _Scanner(1), self._held[self._at - 1 :]
        return True

    def _whole(self, found: list[Piece]) -> bool:
        """All of it has to come."""
        end = self._json.find(0, self._held, self._at)
        self._at = len(self._held) if end is None else end
        if end is None:
            return False
        call = _parsed(self._held[:end], self._form.arguments)
        if call is None or f'"{call[0]}' not in self._head[3]:
            self._no_call(found)
        else:
            self._named(call[0], found)
            found.append(Arguments(self._num_calls - 1, call[1]))
            self._held = self._held[end:]
            self._in = self._behind if self._form.end else self._next
        return True

    def _arguments(self, found: list[Piece]) -> bool:
        if not self._held:
            return False
        end = self._json.find(1, self._held, 0)
        own = self._held if end is None else self._held[:end]
        if own:
            found.append(Arguments(self._num_calls - 1, own))
        self._held = self._held[len(own) :]
        if end is not None:
            self._in = self._rest_of_call
        return end is not None

    def _rest_of_call(self, found: list[Piece]) -> bool:
        """Behind its arguments, which nobody is told."""
        end = self._json.find(0, self._held, 0)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._in = self._behind if self._form.end else self._next
        return end is not None

    def _behind(self, found: list[Piece]) -> bool:
        """Behind its JSON, where its mark should be."""
        end, behind = self._form.end, self._held.lstrip()
        if not behind.startswith(end):
            if end.startswith(behind):
                return False
            behind = self._held
        self._held = behind.removeprefix(end)
        self._in = self._next
        return True

    def _between(self, found: list[Piece]) -> bool:
        """Where calls have no marks around them."""
        behind = self._held.lstrip(self._between_calls)
        if behind:
            self._in = self._rest
            if behind[0] == "{":
                self._begin_call(self._held[: len(self._held) - len(behind)], behind)
        return bool(behind)

    def _nothing(self, found: list[Piece]) -> bool:
        self._held = ""
        return False

    # What follows from it.

    @property
    def _next(self) -> Callable[[list[Piece]], bool]:
        """Where the answer is behind a call."""
        if not self._several:
            return self._nothing
        return self._text if self._form.begin else self._between

    @property
    def _is_behind_calls(self) -> bool:
        """Whether nothing was said since the last call."""
        return self._num_calls > 0 and not self._has_said

    def _say(self, text: str, found: list[Piece]) -> None:
        found.append(ContentDelta(text))
        self._has_said = True

    def _begin_call(self, before: str, held: str) -> None:
        self._before, self._held = before, held
        self._in, self._at, self._num_read = self._call, 0, 0

    def _no_call(self, found: list[Piece]) -> None:
        self._say(self._before + self._held[: self._at], found)
        self._held = self._held[self._at :]
        self._in = self._text if self._form.begin else self._rest

    def _named(self, name: str, found: list[Piece]) -> None:
        found.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1
        self._has_said = False


class _Scanner:
    """Finds where JSON that comes piece by piece closes its brackets. depth: how many are open before it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def find(self, depth: int, text: str, place: int) -> int | None:
        """Behind the bracket that leaves `depth` open, in `text` from `place` on, which comes next; or where it is no
        JSON any more; or None."""
        while place < len(text):
            if self._escaped:
                self._escaped = False
                if text[place] != "\n":
                    place += 1
            telling = (_QUOTED if self._quoted else _UNQUOTED).search(text, place)
            if telling is None:
                return None
            place = telling.end()
            match telling[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._quoted = not self._quoted
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= depth:
                        return place
                case _:
                    return place - 1
        return None


_LONGEST_STRING = 400  # of a head, as it is written: names have at most 64 characters
_STRING = rf'"((?:[^"\\\n]|\\.){{0,{_LONGEST_STRING}}})'
# The next token of a head, and what may become one.
_TOKEN, _BEGUN = re.compile(rf'\s*(?:([{{}},:])|{_STRING}")'), re.compile(rf"\s*(?:{_STRING}\\?)?")
# What tells, in quotes and outside of them: no JSON has a line's end or the beginning of a mark there.
_QUOTED, _UNQUOTED = re.compile(r'["\\\n]'), re.compile(r'["{}\[\]<]')


def _head(form: ToolForm, names: Collection[str]) -> tuple[frozenset[str], ...]:
    """What may be the tokens that a call begins with, of strings a quote and what they say."""
    known = frozenset(f'"{name}' for name in names)
    begin, colon = frozenset("{"), frozenset(":")
    return begin, frozenset(['"name']), colon, known, frozenset(","), frozenset([f'"{form.arguments}']), colon, begin


def _unquoted(written: str) -> str:
    """A quote, and what a string says that JSON has so."""
    try:
        return '"' + json.loads(f'"{written}"')
    except ValueError:
        return '"' + written


def _parsed(text: str, arguments: str) -> tuple[str, str] | None:
    """Name and arguments of a call, these as JSON; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    found = call.get(arguments)
    return (call["name"], json.dumps(found, ensure_ascii=False)) if isinstance(found, dict) else None
