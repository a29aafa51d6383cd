"""Of /v1/completions."""

from typing import Annotated

from pydantic import Field

from longhelix.errors import UserError
from longhelix.request import MAX_LOGPROBS, MOST_TOKENS
from longhelix.serve.bodies.prompt import Prompts
from longhelix.serve.bodies.sampled import Sampled


class CompletionBody(Sampled):
    prompt_field = "prompt"

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @property
    def prompt_logprobs(self) -> int | None:
        """Those of the prompt's tokens go with its echo. Raises UserError where they would have to come in a stream,
        whose prompt is there before they are."""
        if not self.echo or self.logprobs is None:
            return None
        if self.stream:
            raise UserError("echo with logprobs does not stream: leave out one of the three")
        if self.context is not None:
            raise UserError(
                "echo with logprobs is of a prompt that is computed here: leave out context, or one of them"
            )
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be computed."""
        return self.echoes and self.max_tokens == 0 and self.logprobs is None
