"""Parses JSON from clients, within limits on depth and number of values.

The standard library's C parser holds the interpreter lock until it has parsed the entire text. For megabytes of small
values, this takes seconds. The parser in this module lets other threads run between two values.
"""

import json
import re
from json import scanner
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # missing from the stubs
from typing import Any

LONG_TEXT = 1 << 15  # characters. Shorter texts use the C parser, which is ten times as fast and takes at most 2 ms.
DEEPEST = 100  # levels. Schemas of guides have at most 64 levels. The code that reads bodies supports up to 255.
# Maximum number of values in one text. Each value takes 50 to 250 bytes and about a microsecond. Lists of token ids do
# not count, because a prompt may have millions of tokens.
MOST_VALUES = 1 << 18
_NUMBERS = re.compile(r"[ \t\n\r]{0,256}[0-9][0-9, \t\n\r]{1,65536}")  # part of a list of integers


class JsonBoundsError(ValueError):
    """JSON that is nested too deep or has too many values. Callers put the name of the text before the message."""


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        json.JSONDecodeError: the text is not JSON.
        JsonBoundsError: the text exceeds a limit.
    """
    return JsonReader().read(text)


class JsonReader:
    """Parses several texts that share one limit on the number of values."""

    def __init__(self) -> None:
        self._num_values = 0

    def read(self, text: str) -> Any:
        """Parse the next text. Raises the same errors as `read_json`."""
        if len(text) > LONG_TEXT:
            reader = _Reader(self._num_values)
            found = reader.decode(text)
            self._num_values = reader.num_values
            return found
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise _too_deep() from error
        self._num_values += _num_values(found)
        if self._num_values > MOST_VALUES:
            raise _too_many()
        return found


class _Reader(json.JSONDecoder):
    """Parses one text with the standard library's pure Python parser, which calls these methods for each value."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.num_values = num_values  # includes the values of earlier texts
        self._depth = self._objects = 0
        self._keys: dict[str, str] = {}  # makes equal keys share one string
        self.parse_object = self._object
        self.parse_array = self._array
        self._scan = scanner.py_make_scanner(self)
        self.scan_once = self._value

    def _value(self, text: str, start: int) -> tuple[Any, int]:
        self._add(1)
        return self._scan(text, start)

    def _object(self, text_and_start: tuple[str, int], strict: bool, *scan: object) -> Any:
        self._enter()
        self._objects += 1
        found = JSONObject(text_and_start, strict, self._value, None, None, self._keys)
        self._objects -= 1
        self._depth -= 1
        return found

    def _array(self, text_and_start: tuple[str, int], scan_once: object) -> tuple[list[Any], int]:
        self._enter()
        text, start = text_and_start
        numbers, start = self._numbers(text, start)
        values, end = JSONArray((text, start), self._value)
        if numbers and not values:
            raise json.JSONDecodeError("Expecting value", text, end - 1)
        self._depth -= 1
        return (numbers + values if numbers else values), end

    def _numbers(self, text: str, start: int) -> tuple[list[int], int]:
        """Return the integers at the start of a list, except the last integer, and the position of the last integer."""
        numbers: list[int] = []
        while (part := _NUMBERS.match(text, start)) and (comma := part.group().rfind(",")) > 0:
            try:
                found = json.loads(f"[{part.group()[:comma]}]")
            except json.JSONDecodeError:  # the parser of single values then reports the position
                break
            if self._objects > 1:  # token ids of prompts are not nested this deep
                self._add(len(found))
            numbers += found
            start += comma + 1
        return numbers, start

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _too_deep()

    def _add(self, count: int) -> None:
        self.num_values += count
        if self.num_values > MOST_VALUES:
            raise _too_many()


def _too_deep() -> JsonBoundsError:
    return JsonBoundsError(f"is nested deeper than {DEEPEST} levels: make it flatter")


def _too_many() -> JsonBoundsError:
    return JsonBoundsError(f"has more than {MOST_VALUES} values, not counting token ids: send fewer")


def _num_values(found: Any) -> int:
    """Count the values of parsed JSON. Raises JsonBoundsError if they are nested too deep."""
    count, level = 1, [found] if isinstance(found, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        count += len(level)
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise _too_deep()
    return count
