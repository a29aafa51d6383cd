"""The errors that the troubleshooting guide quotes are those that the code raises."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROM_LIBRARIES = ("Unknown option:",)  # cyclopts
_LEAST_SHARE = 0.3  # of a quoted error that is the same in every such message: the rest are values


@cache
def _messages() -> set[tuple[str, ...]]:
    """The strings of the package, each as its constant parts: an f-string has one between two values."""
    found = set()
    for path in (ROOT / "src/longhelix").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr(values=values):
                    found.add(tuple(each.value for each in values if isinstance(each, ast.Constant)))
                case ast.Constant(value=str(text)):
                    found.add((text,))
    return found


def _has(error: str, parts: tuple[str, ...]) -> bool:
    """Whether the error contains these parts in their order, and consists of them for the most part."""
    place = 0
    for part in parts:
        place = error.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return sum(map(len, parts)) >= _LEAST_SHARE * len(error)


def test_every_quoted_error_is_one_of_the_code():
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    quoted = [quote for _, quote in re.findall(r"^> (`+) ?(.*?) ?\1$", page, re.MULTILINE)]
    assert len(quoted) >= 20
    unknown = [
        error
        for error in quoted
        if not error.startswith(FROM_LIBRARIES) and not any(_has(error, parts) for parts in _messages())
    ]
    assert not unknown, "quote these as the code has them now"
