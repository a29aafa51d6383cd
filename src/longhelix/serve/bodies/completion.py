"""Request body of /v1/completions."""

from typing import Annotated

from pydantic import Field

from longhelix.scheduler.request import MAX_LOGPROBS, MOST_TOKENS
from longhelix.serve.bodies.prompt import Prompts
from longhelix.serve.bodies.sampled import ScoredBody


class CompletionBody(ScoredBody):
    """Request to continue prompts."""

    prompt_field = "prompt"

    prompt: Prompts
    """One prompt or several, all as text or all as token ids."""
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    """Maximum number of new tokens; 16 by default."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of likeliest tokens to return for each new token, with their log-probabilities."""
    echo: bool | None = None
    """Begin each answer with its prompt."""
    add_special_tokens: bool | None = None
    """Add special tokens, such as BOS, to the prompt; true by default."""
    return_token_ids: bool | None = None
    """Return the ids of the new tokens and of the token that ended the answer."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens at each prompt token. For an echoed prompt, at least `logprobs`."""
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
        """True if the answer consists only of the prompt. The engine then computes nothing."""
        return self.echoes and self.max_tokens == 0 and self.logprobs is None and self.prompt_logprobs is None
