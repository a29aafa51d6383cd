"""Request bodies of /tokenize and /detokenize."""

from typing import Self

from pydantic import ConfigDict, model_validator

from longhelix.serve.bodies.body import Body, ModelName, Text
from longhelix.serve.bodies.chat import Tools
from longhelix.serve.bodies.message import Messages
from longhelix.serve.bodies.prompt import TokenIds
from longhelix.serve.bodies.templated import PromptEndingBody
from longhelix.serve.bodies.unserved import UNSERVED, check_unserved

# Unsupported fields of other servers that would change the tokens.
_UNSERVED = {
    name: UNSERVED[name] for name in ("chat_template", "documents", "return_token_strs", "mm_processor_kwargs")
}


class TokenizeBody(PromptEndingBody):
    """Text or messages to tokenize. Set either `prompt` or `messages`."""

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
    """Text to tokenize."""
    messages: Messages | None = None
    """Conversation, which the chat template turns into text."""
    add_special_tokens: bool = True
    """Add special tokens, such as BOS, to `prompt`."""
    tools: Tools | None = None
    """Functions that the model may call in the conversation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, _UNSERVED)
        return self


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: ModelName | None = None
    tokens: TokenIds
    """Token ids."""
