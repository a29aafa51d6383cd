"""Types for prompts, which are text or token ids.

For a union of lists, pydantic would collect an error for each item and each type. This module therefore validates
prompts without pydantic.
"""

from array import array
from typing import Annotated, Any, cast

from pydantic import PlainValidator, WithJsonSchema

from longhelix.scheduler.request import MOST_TOKENS

_MOST_PROMPTS = 1024
_PART = 1 << 16  # items of a list that are converted at a time, while other threads wait


def _prompts(given: object) -> "list[str | array[int]]":
    """Validate one or several prompts of text or token ids."""
    prompts: list[object] = (
        given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    )
    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"there are {len(prompts)} prompts: give at most {_MOST_PROMPTS}")
    if len(set(map(type, prompts))) > 1:
        raise ValueError("prompts must be all text or all token ids")
    return [_text_or_ids(prompt) for prompt in prompts]


def _prompt(given: object) -> "str | array[int]":
    """Validate one prompt of text or token ids."""
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        raise ValueError("give one prompt, as text or as token ids")
    return _text_or_ids(given)


def _text_or_ids(prompt: object) -> "str | array[int]":
    if isinstance(prompt, str):
        _check_text(prompt)
        return prompt
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is not int:
        raise ValueError("give text, token ids, or a list of either; none may be empty")
    return _token_ids(prompt)


def _token_ids(given: object) -> "array[int]":
    """Return token ids as an int32 array, which takes a tenth of the memory of a list."""
    if not isinstance(given, list):
        raise ValueError("give a list of token ids")
    found = array("i")
    for start in range(0, len(given), _PART):
        part = given[start : start + _PART]
        if set(map(type, part)) != {int}:
            raise ValueError("token ids must be integers")
        if not 0 <= min(part) <= max(part) <= MOST_TOKENS:
            raise ValueError(f"token ids must be integers from 0 to {MOST_TOKENS}")
        found.fromlist(cast("list[int]", part))
    return found


def _check_text(text: str) -> None:
    if not text:
        raise ValueError("a prompt is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt has half a surrogate pair at character {error.start}") from error


_ANY_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}}
_IDS_SCHEMA = _ANY_IDS_SCHEMA | {"minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS}
_ONE_PROMPT_SCHEMA = {"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA]}
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, _SEVERAL | {"items": _TEXT_SCHEMA}, _SEVERAL | {"items": _IDS_SCHEMA}]
}


TokenIds = Annotated[Any, PlainValidator(_token_ids), WithJsonSchema(_ANY_IDS_SCHEMA)]
Prompt = Annotated[Any, PlainValidator(_prompt), WithJsonSchema(_ONE_PROMPT_SCHEMA)]
Prompts = Annotated[Any, PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
