"""What all routes share: the engine, its model's name, and how requests are made of what clients send."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longhelix.engine.llm import LLM
from longhelix.errors import UserError
from longhelix.request import SamplingParams
from longhelix.serve.bodies import Sampled
from longhelix.serve.calls import Call, current
from longhelix.serve.driver import Answers, Asked, Driver, ShuttingDownError
from longhelix.serve.journal import Journal
from longhelix.serve.metrics import PREFIX, Metrics
from longhelix.serve.traces import Traces


@dataclass
class Serving:
    """`model`: the name that clients know it by. created_s: when it started, by the wall clock. metrics_prefix: of the
    names of metrics. Raises UserError for one that is none."""

    llm: LLM
    driver: Driver
    model: str
    created_s: int
    is_draining: bool = False
    metrics_prefix: str = PREFIX
    journal: Journal = field(default_factory=Journal)
    traces: Traces | None = None
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.driver, self.llm.config, self.model, self.metrics_prefix)
        self.driver.on_failure = self._failed

    def _failed(self, reason: str) -> None:
        self.journal.tell("failure", f"the engine has failed: {reason}", reason=reason)

    @property
    def call(self) -> Call:
        """The HTTP request that is being answered."""
        found = current()
        return Call(self.metrics) if found is None else found

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

    async def ask(self, asked: Sequence[Asked]) -> Answers:
        """Have the engine take requests together: all of them, or none. Raises what `Answers.ask` does, or
        ShuttingDownError."""
        if self.is_draining:
            raise ShuttingDownError
        answers = Answers(self.driver, self.call)
        await answers.ask(asked)
        return answers

    async def token_ids(self, encode: Callable[..., list[int]], given: Any) -> list[int]:
        """What a tokenizer or a chat template makes of text, off the event loop. Raises UserError for text that is too
        long, before anything is made of it."""
        length = len(given) if isinstance(given, str) else sum(len(message["content"]) for message in given)
        most = self.max_model_len * self.llm.tokenizer.longest_token
        if length > most:
            raise UserError(
                f"the text has {length} characters, and {self.max_model_len} tokens, which the model's context has, "
                f"cannot be more than {most}: shorten it",
                "context_length_exceeded",
            )
        return await asyncio.to_thread(encode, given)

    def requests(
        self,
        body: Sampled,
        prompts: Sequence[list[int]],
        most_tokens: int | None,
        logprobs: int | None,
    ) -> list[Asked]:
        """One for each choice of each prompt, in order. most_tokens: of an answer; None: what the context leaves.
        Raises UserError for what can never run."""
        if len(prompts) * body.choices > self.driver.most_requests:
            raise UserError(
                f"{len(prompts)} prompts and n {body.choices} are {len(prompts) * body.choices} requests, but "
                f"{self.driver.most_requests} may wait here: send fewer"
            )
        asked, watched, service = [], body.asks_for("include_progress"), body.service()
        samplings: dict[int, list[SamplingParams]] = {}
        for prompt in prompts:
            left = self.max_model_len - len(prompt)
            if left < 1 or (most_tokens is not None and most_tokens > left):
                wanted = len(prompt) + (1 if most_tokens is None else most_tokens)
                raise UserError(
                    f"the prompt has {len(prompt)} tokens, and with the answer's there may be {wanted}, but the "
                    f"model's context has {self.max_model_len}: shorten the prompt, or ask for fewer tokens",
                    "context_length_exceeded",
                )
            most_new = left if most_tokens is None else most_tokens
            if most_new not in samplings:
                samplings[most_new] = [body.sampling(most_new, choice, logprobs) for choice in range(body.choices)]
            asked += [Asked(prompt, len(prompt), sampling, service, watched) for sampling in samplings[most_new]]
        return asked
