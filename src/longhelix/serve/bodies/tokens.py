"""Of /tokenize and /detokenize."""

from typing import Self

from pydantic import ConfigDict, model_validator

from longhelix.serve.bodies.body import Body, ModelName, Text
from longhelix.serve.bodies.chat import Tools
from longhelix.serve.bodies.message import Messages
from longhelix.serve.bodies.prompt import TokenIds
from longhelix.serve.bodies.templated import Ended
from longhelix.serve.bodies.unserved import UNSERVED, check_unserved

# Of what is refused elsewhere, what changes tokens.
_UNSERVED = {
    name: UNSERVED[name] for name in ("chat_template", "documents", "return_token_strs", "mm_processor_kwargs")
}


class TokenizeBody(Ended):
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
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, _UNSERVED)
        return self


class DetokenizeBody(Body):
    model: ModelName | None = None
    tokens: TokenIds
