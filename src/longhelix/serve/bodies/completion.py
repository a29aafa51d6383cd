"""Of /v1/completions."""

from typing import Annotated

from pydantic import Field

from longhelix.scheduler.request import MAX_LOGPROBS, MOST_TOKENS
from longhelix.serve.bodies.prompt import Prompts
from longhelix.serve.bodies.sampled import ScoredBody


class CompletionBody(ScoredBody):
    prompt_field = "prompt"

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Those that go with the prompt's echo are as many as those of new tokens."""
        asked = super().num_prompt_logprobs
        if not self.echo or self.logprobs is None:
            return asked
        self.check_scored("echo with logprobs")
        return max(self.logprobs, asked or 0)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be computed."""
        return self.echoes and self.max_tokens == 0 and self.logprobs is None and self.prompt_logprobs is None
