"""The text by which a router recognises requests that can use the same KV blocks."""

import hashlib
import io
from collections.abc import Iterator
from typing import Any

from longhelix.serve.json_reader import read_json

_MOST_CHARACTERS = 1 << 16  # a router keeps the texts of many prompts, and compares them character by character
# Fields that decide which cached blocks a request can use, in the order of the prompt's tokens.
_FIELDS = ("cache_salt", "tools", "instructions", "prompt", "messages", "input")
_SAME_IN_MOST = ("role", "type")  # keys with values that say little about the prompt
_CONTEXTS = "/v1/contexts"


def routing_text(method: str, path: str, body: bytes) -> str:
    """Return a text that starts in the same way for two requests if they can use the same KV blocks.

    For a saved context, it is a digest of the context's name, because names may begin alike. Otherwise it consists of
    all strings and numbers in the fields of a prompt, up to 65,536 characters.

    Args:
        method: method of an HTTP request.
        path: its path.
        body: its body. The result is empty for a request without a prompt or a context.
    """
    if path.startswith(f"{_CONTEXTS}/"):
        return _of_context(path.removeprefix(f"{_CONTEXTS}/"))
    if method != "POST":
        return ""
    try:
        found = read_json(body.decode("utf-8-sig"))
    except ValueError:  # the server will describe the error
        return ""
    if not isinstance(found, dict):
        return ""
    context = found.get("id" if path == _CONTEXTS else "context")
    if isinstance(context, str):
        return _of_context(context)
    text = io.StringIO()
    for leaf in _leaves([found.get(field) for field in _FIELDS]):
        text.write(leaf)
        if text.tell() >= _MOST_CHARACTERS:
            break
    return text.getvalue()[:_MOST_CHARACTERS]


def _of_context(name: str) -> str:
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in _SAME_IN_MOST:
                yield from _leaves(each)
    elif isinstance(value, int | float):
        yield f"{value} "
