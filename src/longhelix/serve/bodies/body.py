"""What all bodies have in common."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from longhelix.compute.cache.context_folder import context_name
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.values import text

TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
ContextName = Annotated[str, AfterValidator(context_name)]
ModelName = Annotated[str, Field(max_length=4096)]
# Pydantic lets half a surrogate pair pass in a string of any length, and no tokenizer takes it, nor can an answer quote
# it. Of what becomes a stop string or a schema, who makes that says so.
Text = Annotated[str, AfterValidator(lambda given: text("it", given))]


def few(most: int) -> BeforeValidator:
    """Of an object: it has at most so many entries, which is looked at before any of them is. Pydantic looks at all of
    them first, and has an error for each."""

    def check(given: object) -> object:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"there are {len(given)} entries: give at most {most}")
        return given

    return BeforeValidator(check)


def check_quoted(extra: Mapping[str, Any] | None) -> None:
    """Refuse unknown fields that an answer quotes and that cannot be written as UTF-8."""
    text("it", json.dumps(extra or {}, ensure_ascii=False))


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
