"""Calls of functions, as models write them into their answers."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longhelix.guide import in_lark
from longhelix.text.stop_strings import overlap


@dataclass(frozen=True)
class ToolForm:
    """How a model writes a call: a JSON object with the function's "name" and, under the name `arguments`, what it is
    called with, between `begin` and `end`. begin "": an answer is calls from its first character on, or has none.
    separator: stands between two calls."""

    begin: str
    end: str
    arguments: str
    separator: str

    @cached_property
    def head(self) -> re.Pattern[str]:
        """What a call begins with, up to its arguments, in the order that models are shown."""
        name = r'"((?:[^"\\]|\\.)*)"'
        return re.compile(rf'\s*\{{\s*"name"\s*:\s*{name}\s*,\s*"{self.arguments}"\s*:\s*(?=\{{)')

    def lark(self, functions: Mapping[str, Mapping[str, Any]], several: bool) -> str:
        """A grammar of answers that are calls, of one function or `several`. functions: the schema of each one's
        arguments, by name."""
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
    """The form that a chat template shows its model; None for one that is not known here."""
    if HERMES.begin in template:
        # Others write their calls as XML between the same marks.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    return LLAMA if '"parameters": ' in template and '{"name": ' in template else None


@dataclass(frozen=True)
class Text:
    """More of what an answer says."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call begins, the one with that place among those of the answer."""

    place: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON of a call's arguments."""

    place: int
    text: str


Piece = Text | Call | Arguments


class ToolCalls:
    """Splits an answer that comes piece by piece into text and calls of the functions of some names. What looks like a
    call and is none is text."""

    def __init__(self, form: ToolForm, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._in = self._text if form.begin else self._first
        self._num_calls = 0
        self._json = _JsonEnd()

    @property
    def num_calls(self) -> int:
        """How many have begun."""
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._in(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        if self._in == self._call:
            held = self._form.begin + held
        elif self._in in (self._behind, self._between):
            held = ""
        return [Text(held)] if held else []

    # Where the answer is. Each takes what it can of the text that is held, and says whether another may take more.

    def _first(self, found: list[Piece]) -> bool:
        begun = self._held.lstrip()
        if begun:
            self._in = self._call if begun[0] == "{" else self._rest
        return bool(begun)

    def _rest(self, found: list[Piece]) -> bool:
        if self._held:
            found.append(Text(self._held))
            self._held = ""
        return False

    def _text(self, found: list[Piece]) -> bool:
        begin = self._form.begin
        before, mark, behind = self._held.partition(begin)
        if mark:
            if before.strip():
                found.append(Text(before.rstrip()))
            self._in, self._held = self._call, behind
            return True
        # Blanks that end it may come before a call, of which they are no part.
        safe = self._held[: len(self._held) - overlap(self._held, begin)].rstrip()
        if safe:
            found.append(Text(safe))
            self._held = self._held[len(safe) :]
        return False

    def _call(self, found: list[Piece]) -> bool:
        head = self._form.head.match(self._held)
        if head is not None and _name(head[1]) in self._names:
            found.append(Call(self._num_calls, _name(head[1])))
            self._num_calls += 1
            self._held = self._held[head.end() :]
            self._in, self._json = self._arguments, _JsonEnd()
            return True
        whole = self._whole_call()
        if whole is None:
            return False
        call = _parsed(whole, self._form.arguments)
        if call is None or call[0] not in self._names:
            found.append(Text(self._form.begin + whole + self._form.end))
            self._in = self._text if self._form.begin else self._rest
        else:
            found += [Call(self._num_calls, call[0]), Arguments(self._num_calls, call[1])]
            self._num_calls += 1
            self._in = self._text if self._form.begin else self._between
        self._held = self._held[len(whole) + len(self._form.end) :]
        return True

    def _whole_call(self) -> str | None:
        """The text of a call, once all of it has come."""
        if self._form.end:
            before, mark, _ = self._held.partition(self._form.end)
            return before if mark else None
        end = _JsonEnd().find(self._held)
        return None if end is None else self._held[:end]

    def _arguments(self, found: list[Piece]) -> bool:
        if not self._held:
            return False
        end = self._json.find(self._held)
        own = self._held if end is None else self._held[:end]
        found.append(Arguments(self._num_calls - 1, own))
        self._held = self._held[len(own) :]
        if end is not None:
            self._in = self._behind
        return end is not None

    def _behind(self, found: list[Piece]) -> bool:
        """Up to the end of the call."""
        end = self._form.end or "}"
        _, mark, behind = self._held.partition(end)
        if mark:
            self._held = behind
            self._in = self._text if self._form.begin else self._between
        return bool(mark)

    def _between(self, found: list[Piece]) -> bool:
        """Where calls have no marks around them."""
        behind = self._held.lstrip(" \n;")
        if behind:
            self._held = behind
            self._in = self._call if behind[0] == "{" else self._rest
        return bool(behind)


class _JsonEnd:
    """Finds where a JSON object that comes piece by piece ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """Behind its last character in what comes next, or None."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def _name(written: str) -> str:
    """Of a function, as JSON has it between quotes."""
    try:
        return json.loads(f'"{written}"')
    except ValueError:
        return written


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
