"""Of /tokenize and /detokenize."""

from typing import Annotated

from pydantic import ConfigDict, Field

from longhelix.serve.bodies.body import Body, ModelName, Text, TokenId
from longhelix.serve.bodies.message import Messages


class TokenizeBody(Body):
    """Text, or messages, as tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}
                for name, other in (("prompt", "messages"), ("messages", "prompt"))
            ]
        }
    )

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
