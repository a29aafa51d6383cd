"""Base class of all request bodies, and types that their fields share."""

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
# Text without unpaired surrogates. Pydantic allows unpaired surrogates, but tokenizers do not, and no response can
# quote them. `SamplingParams` and `Guide` check stop strings and schemas themselves.
Text = Annotated[str, AfterValidator(lambda given: text("it", given))]


def few(most: int) -> BeforeValidator:
    """Return a validator that limits the number of entries of an object before any entry is validated.

    Pydantic's own limit would validate all entries first and collect an error for each entry.
    """

    def check(given: object) -> object:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"there are {len(given)} entries: give at most {most}")
        return given

    return BeforeValidator(check)


def check_quoted(extra: Mapping[str, Any] | None) -> None:
    """Refuse unknown fields if an answer would quote them and they cannot be encoded as UTF-8."""
    text("it", json.dumps(extra or {}, ensure_ascii=False))


class Body(BaseModel):
    """Base of all request bodies. The docstring below a field is its description in the OpenAPI schema."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)
