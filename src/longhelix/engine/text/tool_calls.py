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
    """How a model writes a tool call. A call is a JSON object with "name" and arguments, between two marks."""

    begin: str  # mark before a call; if empty, an answer either starts with a call or has no calls
    end: str  # mark after a call
    arguments: str  # key of the arguments in the JSON object
    separator: str  # text between two calls

    def lark(self, functions: Mapping[str, Mapping[str, Any]], several: bool) -> str:
        """Return a Lark grammar for an answer that is one call, or several calls if `several` is true.

        functions: the JSON schema of each function's arguments, by name.
        """
        rules = [f"start: call ({json.dumps(self.separator)} call)*" if several else "start: call"]
        marks = (f"{self.begin}\n", f"\n{self.end}") if self.begin else ("", "")
        rules.append("call: {} one {}".format(*map(json.dumps, marks)))
        rules.append("one: " + " | ".join(f"f{place}" for place in range(len(functions))))
        for place, (name, schema) in enumerate(functions.items()):
            before = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
            # Each schema stays a separate document, because its references are resolved within the document.
            rules.append(f"f{place}: {json.dumps(before)} a{place} {json.dumps('}')}")
            rules.append(f"a{place}: {in_lark({'type': 'object'} | dict(schema))}")
        return "\n".join(rules)


HERMES = ToolForm("<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA = ToolForm("", "", "parameters", "; ")


def form_of(template: str) -> ToolForm | None:
    """Return the form of tool calls that a chat template shows to its model, or None if the form is unknown."""
    if HERMES.begin in template:
        # Some models write XML between the same marks.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    return LLAMA if '"parameters": ' in template and '{"name": ' in template else None


@dataclass(frozen=True)
class ContentDelta:
    """The next part of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The start of a tool call."""

    place: int  # index of the call in the answer
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of the JSON of a call's arguments."""

    place: int  # index of the call in the answer
    text: str


Piece = ContentDelta | ToolCallStart | Arguments


class ToolCalls:
    """Splits an answer that arrives in pieces into text and tool calls.

    Text that looks like a call but is not a call stays text. The result does not depend on how the answer is split into
    pieces. Each character is read only a few times.

    Args:
        form: how the model writes calls.
        names: names of the functions that may be called.
        several: whether calls may follow the first one. If not, everything after the first call is dropped.
    """

    def __init__(self, form: ToolForm, names: Collection[str], several: bool = True) -> None:
        self._form, self._several = form, several
        self._head = _head(form, names)
        # Keys with which a call may start if its keys are in a different order.
        self._other_keys = frozenset({'"type', '"id', f'"{form.arguments}'})
        # Characters that are allowed between calls. None means whitespace.
        self._between_calls = None if form.begin else " \t\r\n;"
        self._held = ""
        self._state: Callable[[list[Piece]], bool] = self._text if form.begin else self._first
        self._num_calls = 0
        self._before = ""  # text before a possible call, which becomes text again if it is not a call
        self._has_text_since_call = False  # True if there was text after the last call
        # How far the current call has been read: index in the held text, and number of tokens of the call's head.
        self._at = self._num_read = 0
        self._name = ""
        self._json = _Scanner()

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the answer. Returns the text and the parts of calls that it completes."""
        self._held += text
        found: list[Piece] = []
        while self._state(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """Return the text that was held back. Call this method at the end of the answer."""
        held, self._held = self._held, ""
        if self._state in (self._call, self._whole):
            held = self._before + held
        elif self._state == self._after_json or (self._is_after_calls and not held.strip(self._between_calls)):
            held = ""
        return [ContentDelta(held)] if held else []

    # States of the parser. Each state removes as much as it can from the held text. It returns whether the next state
    # may be able to remove more.

    def _first(self, found: list[Piece]) -> bool:
        stripped = self._held.lstrip()
        if stripped:
            self._state = self._rest
            if stripped[0] == "{":
                self._begin_call("", self._held)
        return bool(stripped)

    def _rest(self, found: list[Piece]) -> bool:
        if self._held:
            self._add_text(self._held, found)
            self._held = ""
        return False

    def _text(self, found: list[Piece]) -> bool:
        begin = self._form.begin
        before, mark, after = self._held.partition(begin)
        # Whitespace at the end is held back, because whitespace before a call is not part of the text.
        safe = (before if mark else before[: len(before) - overlap(before, begin)]).rstrip()
        if safe:
            self._add_text(safe, found)
        if mark:
            self._begin_call(before[len(safe) :] + mark, after)
        else:
            self._held = before[len(safe) :]
        return bool(mark)

    def _call(self, found: list[Piece]) -> bool:
        """State inside a call, before its arguments, if the keys are in the order that chat templates show."""
        token = _TOKEN.match(self._held, self._at)
        if token is None and _BEGUN.fullmatch(self._held, self._at):
            return False
        read = "" if token is None else token[1] or _unquoted(token[2])
        if read not in self._head[self._num_read]:
            # If the keys are in a different order, the call can be parsed only when it is complete.
            if self._num_read in (4, 5) or (self._num_read == 1 and read in self._other_keys):
                self._state, self._json, self._at = self._whole, _Scanner(), 0
            else:
                self._reject_call(found)
            return True
        assert token is not None
        self._at, self._num_read = token.end(), self._num_read + 1
        if self._num_read == 4:
            self._name = read[1:]
        if self._num_read == len(self._head):
            self._start_call(self._name, found)
            self._state, self._json, self._held = self._arguments, _Scanner(1), self._held[self._at - 1 :]
        return True

    def _whole(self, found: list[Piece]) -> bool:
        """State inside a call whose keys are in a different order. The call is parsed when it is complete."""
        end = self._json.find(0, self._held, self._at)
        self._at = len(self._held) if end is None else end
        if end is None:
            return False
        call = _parsed(self._held[:end], self._form.arguments)
        if call is None or f'"{call[0]}' not in self._head[3]:
            self._reject_call(found)
        else:
            self._start_call(call[0], found)
            found.append(Arguments(self._num_calls - 1, call[1]))
            self._held = self._held[end:]
            self._state = self._after_json if self._form.end else self._next
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
            self._state = self._rest_of_call
        return end is not None

    def _rest_of_call(self, found: list[Piece]) -> bool:
        """State after the arguments of a call. The rest of the call's JSON is dropped."""
        end = self._json.find(0, self._held, 0)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._state = self._after_json if self._form.end else self._next
        return end is not None

    def _after_json(self, found: list[Piece]) -> bool:
        """State after the call's JSON, where the end mark should be."""
        end, after = self._form.end, self._held.lstrip()
        if not after.startswith(end):
            if end.startswith(after):
                return False
            after = self._held
        self._held = after.removeprefix(end)
        self._state = self._next
        return True

    def _between(self, found: list[Piece]) -> bool:
        """State between calls that have no marks around them."""
        after = self._held.lstrip(self._between_calls)
        if after:
            self._state = self._rest
            if after[0] == "{":
                self._begin_call(self._held[: len(self._held) - len(after)], after)
        return bool(after)

    def _discard(self, found: list[Piece]) -> bool:
        self._held = ""
        return False

    @property
    def _next(self) -> Callable[[list[Piece]], bool]:
        """The state after a call."""
        if not self._several:
            return self._discard
        return self._text if self._form.begin else self._between

    @property
    def _is_after_calls(self) -> bool:
        """True if there was a call and no text after the last call."""
        return self._num_calls > 0 and not self._has_text_since_call

    def _add_text(self, text: str, found: list[Piece]) -> None:
        found.append(ContentDelta(text))
        self._has_text_since_call = True

    def _begin_call(self, before: str, held: str) -> None:
        self._before, self._held = before, held
        self._state, self._at, self._num_read = self._call, 0, 0

    def _reject_call(self, found: list[Piece]) -> None:
        self._add_text(self._before + self._held[: self._at], found)
        self._held = self._held[self._at :]
        self._state = self._text if self._form.begin else self._rest

    def _start_call(self, name: str, found: list[Piece]) -> None:
        found.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1
        self._has_text_since_call = False


class _Scanner:
    """Finds closing brackets in JSON that arrives in pieces. depth: number of brackets that are open at the start."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def find(self, depth: int, text: str, place: int) -> int | None:
        """Read the next piece of JSON, which is the part of `text` from index `place`.

        Returns:
            The index after the bracket that leaves `depth` brackets open, or the index of a character that cannot be
            part of JSON. None if the piece contains neither.
        """
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


_LONGEST_STRING = 400  # characters, as written, of the longest string in a head; names have at most 64
_STRING = rf'"((?:[^"\\\n]|\\.){{0,{_LONGEST_STRING}}})'
# The next token of a head, and text that may become a token.
_TOKEN, _BEGUN = re.compile(rf'\s*(?:([{{}},:])|{_STRING}")'), re.compile(rf"\s*(?:{_STRING}\\?)?")
# Characters that change the scanner's state, inside and outside strings. JSON has no line end inside a string and no
# "<" outside strings.
_QUOTED, _UNQUOTED = re.compile(r'["\\\n]'), re.compile(r'["{}\[\]<]')


def _head(form: ToolForm, names: Collection[str]) -> tuple[frozenset[str], ...]:
    """Return the allowed tokens at each position of a call's head. A string token is a quote and the string's value."""
    known = frozenset(f'"{name}' for name in names)
    begin, colon = frozenset("{"), frozenset(":")
    return begin, frozenset(['"name']), colon, known, frozenset(","), frozenset([f'"{form.arguments}']), colon, begin


def _unquoted(written: str) -> str:
    """Return the value of a JSON string with a quote before it."""
    try:
        return '"' + json.loads(f'"{written}"')
    except ValueError:
        return '"' + written


def _parsed(text: str, arguments: str) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON, or None if the text is not a call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    found = call.get(arguments)
    return (call["name"], json.dumps(found, ensure_ascii=False)) if isinstance(found, dict) else None
