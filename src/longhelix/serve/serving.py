"""What all routes share: the engine, its model's name, and how requests are made of what clients send."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longhelix.engine.llm import LLM
from longhelix.errors import EngineError, UserError
from longhelix.request import SamplingParams
from longhelix.serve.bodies import Sampled
from longhelix.serve.driver import Answers, Asked, Driver


@dataclass
class Serving:
    """`model`: the name that clients know it by. created_s: when it started, by the wall clock."""

    llm: LLM
    driver: Driver
    model: str
    created_s: int
    is_draining: bool = False

    @property
    def max_model_len(self) -> int:
        return self.llm.config.scheduler.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise UserError for the name of another model."""
        if name is not None and name != self.model:
            raise UserError(f"there is no model {name[:200]!r} here: use {self.model!r}", "model_not_found")

    async def text(self, token_ids: list[int]) -> str:
        """Special tokens included. Raises UserError for ids that are no tokens."""
        beyond = next((each for each in token_ids if each >= self.llm.config.spec.vocab_size), None)
        if beyond is not None:
            raise UserError(f"token {beyond} is outside the model's vocabulary of {self.llm.config.spec.vocab_size}")
        return await asyncio.to_thread(self.llm.tokenizer.spell, token_ids)

    def ask(self, asked: Sequence[Asked]) -> Answers:
        """Queue requests together: all of them, or none. Raises OverloadedError or EngineError."""
        if self.is_draining:
            raise EngineError("the server is shutting down and takes no more requests")
        answers = Answers(self.driver)
        answers.ask(asked)
        return answers

    async def token_ids(self, encode: Callable[..., list[int]], *given: Any) -> list[int]:
        """What a tokenizer or a chat template makes of text, off the event loop."""
        return await asyncio.to_thread(encode, *given)

    def requests(
        self,
        body: Sampled,
        prompts: Sequence[list[int]],
        most_tokens: int | None,
        logprobs: int | None,
    ) -> list[Asked]:
        """One for each choice of each prompt, in order. most_tokens: of an answer; None: what the context leaves.
        Raises UserError for what can never run."""
        asked, watched = [], body.asks_for("include_progress")
        for prompt in prompts:
            left = self.max_model_len - len(prompt)
            if left < 1 or (most_tokens is not None and most_tokens > left):
                wanted = len(prompt) + (1 if most_tokens is None else most_tokens)
                raise UserError(
                    f"the prompt has {len(prompt)} tokens, and with the answer's there may be {wanted}, but the "
                    f"model's context has {self.max_model_len}: shorten the prompt, or ask for fewer tokens",
                    "context_length_exceeded",
                )
            for choice in range(body.choices):
                sampling: SamplingParams = body.sampling(most_tokens or left, choice, logprobs)
                asked.append(Asked(prompt, len(prompt), sampling, body.service(), body.context, watched))
        return asked
