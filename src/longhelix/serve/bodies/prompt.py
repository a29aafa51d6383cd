"""Prompts of text or token ids. By hand: a union of lists has an error for each item of each."""

from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from longhelix.request import MOST_TOKENS

_MOST_PROMPTS = 1024


def _prompts(given: object) -> list[str | list[int]]:
    """One prompt or several, of text or token ids."""
    prompts = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"there are {len(prompts)} prompts: give at most {_MOST_PROMPTS}")
    if len(set(map(type, prompts))) > 1:
        raise ValueError("prompts are all text, or all token ids")
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text(prompt)
        elif not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
            raise ValueError("give text, token ids, or a list of either, none of them empty")
        elif not 0 <= min(prompt) <= max(prompt) <= MOST_TOKENS:
            raise ValueError(f"token ids are whole numbers from 0 to {MOST_TOKENS}")
    if "" in prompts:
        raise ValueError("a prompt is empty: give at least one character")
    return prompts


def _prompt(given: object) -> str | list[int]:
    """One prompt."""
    found = _prompts(given)
    if found != [given]:
        raise ValueError("give one prompt, of text or token ids")
    return found[0]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt has half a surrogate pair at character {error.start}") from error


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": _MOST_PROMPTS}
_ONE_PROMPT_SCHEMA = {"anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA]}
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, _SEVERAL | {"items": _TEXT_SCHEMA}, _SEVERAL | {"items": _IDS_SCHEMA}]
}


Prompt = Annotated[str | list[int], PlainValidator(_prompt), WithJsonSchema(_ONE_PROMPT_SCHEMA)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
