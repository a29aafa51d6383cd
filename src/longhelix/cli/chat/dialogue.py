"""Dialogue with an engine: sends messages and streams the answers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from rich.console import Console
from rich.progress import Progress

from longhelix.cli.chat.conversation import Conversation
from longhelix.engine.llm import LLM
from longhelix.engine.result import Delta, Result
from longhelix.engine.text.reasoning import ReasoningForm
from longhelix.errors import RequestError
from longhelix.scheduler.request import SamplingParams

_LONG_TOKENS = 512  # shorter prompts are prefilled too quickly for a progress bar


class Dialogue:
    """State of a chat: the engine, the conversation, the last result, and whether the chat has ended.

    Answers go to standard output. Reasoning and notes go to the console `notes`.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, notes: Console, reasoning_form: ReasoningForm | None = None
    ) -> None:
        self.llm = llm
        self.notes = notes
        self.conversation = Conversation(llm.tokenizer.encode_chat, llm.config.scheduler.longest_request_tokens)
        self.last: Result | None = None
        self.over = False
        self._params = params
        self._reasoning_form = reasoning_form

    def answer(self, text: str, interrupts: Sequence[int]) -> None:
        """Answer a message. A message that gets no answer is not added to the conversation.

        Args:
            text: the message.
            interrupts: list to which a signal handler appends. The answer stops as soon as the list is not empty.

        Raises:
            UserError: the context has no room for an answer.
            RequestError: the answer failed.
        """
        prompt_ids = self.conversation.prompt(text)
        room = self.conversation.context_tokens - len(prompt_ids)
        most = min(self._params.max_new_tokens, room)
        params = replace(self._params, max_new_tokens=most, min_tokens=min(self._params.min_tokens, most))
        result = self._run(prompt_ids, params, interrupts)
        if result.error is not None:
            raise RequestError(f"the answer failed: {result.error}")
        self.last = result
        if result.finish_reason == "abort" and not result.token_ids:
            self.notes.print("[Stopped before the answer started. The message is not part of the conversation.]")
            return
        num_tokens = len(prompt_ids) + len(result.token_ids)
        self.conversation.add(text, result.text, num_tokens, result.reasoning or "")
        if result.finish_reason == "abort":
            self.notes.print(f"[Stopped after {len(result.token_ids)} tokens.]")
        elif result.finish_reason == "length" and params.max_new_tokens == room:
            self.notes.print(
                f"[The answer is incomplete: the context of {self.conversation.context_tokens} tokens is full. "
                "Start a new conversation with /reset.]"
            )
        elif result.finish_reason == "length":
            self.notes.print(f"[The answer is incomplete: it reached --max-new-tokens {params.max_new_tokens}.]")

    def _run(self, prompt_ids: list[int], params: SamplingParams, interrupts: Sequence[int]) -> Result:
        form = self._reasoning_form
        tags = None if form is None else self.llm.tokenizer.reasoning_tags(form, prompt_ids)
        request_id = self.llm.add(prompt_ids, params, reasoning=tags)
        steps = self._steps(request_id, interrupts)
        result, has_reasoned = None, False
        for delta in chain(self._after_prompt(request_id, len(prompt_ids), steps), chain.from_iterable(steps)):
            if delta.reasoning:
                self.notes.print(delta.reasoning, end="", style="dim")
                has_reasoned = True
            if has_reasoned and (delta.text or delta.result is not None):
                self.notes.print("\n")
                has_reasoned = False
            print(delta.text, end="", flush=True)
            result = delta.result
        print()
        assert result is not None, "the engine has nothing to do, and the request has not ended"
        return result

    def _steps(self, request_id: int, interrupts: Sequence[int]) -> Iterator[list[Delta]]:
        """Yield the deltas of each step until the request ends or an interrupt aborts it."""
        while self.llm.has_work:
            yield self.llm.step()
            if interrupts and (aborted := self.llm.abort(request_id)) is not None:
                yield [Delta(request_id, "", aborted)]

    def _after_prompt(self, request_id: int, num_tokens: int, steps: Iterator[list[Delta]]) -> list[Delta]:
        """Return the first deltas. While a long prompt is computed, show its progress."""
        shown = num_tokens > _LONG_TOKENS and self.notes.is_terminal
        with Progress(console=self.notes, transient=True, disable=not shown) as progress:
            bar = progress.add_task(f"reading {num_tokens} tokens", total=num_tokens)
            for deltas in steps:
                if deltas:
                    return deltas
                progress.update(bar, completed=self.llm.prefilled_tokens(request_id))
        return []
