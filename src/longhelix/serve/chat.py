"""/v1/chat/completions: the next message of a conversation."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers as forms
from longhelix.serve.bodies import ChatBody
from longhelix.serve.driver import Answers
from longhelix.serve.errors import statuses, streamed
from longhelix.serve.form import Events, Form
from longhelix.serve.serving import Serving
from longhelix.serve.streams import collect, stream
from longhelix.serve.token_logprobs import chat_logprobs


def routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_model=forms.ChatCompletion,
        responses=statuses(404, 429, 500, 503) | streamed(),
    )
    async def chat(body: ChatBody, request: Request) -> Any:
        serving.check_model(body.model)
        form, answers = await _ask(serving, body)
        if body.stream:
            return stream(answers, form)
        return await asyncio.to_thread(form.whole, await collect(answers, request))

    return router


async def _ask(serving: Serving, body: ChatBody) -> tuple["_Form", Answers]:
    before = await serving.context_tokens(body.context)
    prompt = await serving.conversation(body.messages, "messages", body.context)
    asked = serving.requests(body, [prompt], body.most_tokens, body.num_logprobs, before)
    answers = await serving.ask(asked)
    return _Form(serving, body, [replace(each, prompt=()) for each in asked]), answers


class _Form(Form):
    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    body: ChatBody

    def whole(self, results: list[Result]) -> forms.ChatCompletion:
        choices = [
            forms.ChatChoice(
                index=place,
                message=forms.Reply(content=result.text),
                logprobs=self._logprobs(result.token_ids, result.logprobs),
                finish_reason=forms.finish_reason(result),
            )
            for place, result in enumerate(results)
        ]
        return forms.ChatCompletion(**self.head, choices=choices, usage=forms.usage(results, self.body.choices))

    def first(self) -> Events:
        for place in range(self.body.choices):
            yield self.event([_choice(place, {"role": "assistant", "content": ""})])

    def choices(self, place: int, delta: Delta) -> Iterator[Mapping[str, Any]]:
        logprobs = None
        if delta.token_id is not None and delta.logprobs is not None:
            logprobs = self._logprobs([delta.token_id], [delta.logprobs])
        if delta.text or logprobs is not None:
            yield _choice(place, {"content": delta.text}, logprobs)
        if delta.result is not None:
            yield _choice(place, {}, reason=forms.finish_reason(delta.result))

    def _logprobs(self, token_ids: list[int], logprobs: list[dict[int, float]] | None) -> forms.ChatLogprobs | None:
        num_best = self.body.num_logprobs
        if num_best is None or logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, token_ids, logprobs, num_best)


def _choice(
    place: int, delta: dict[str, str], logprobs: forms.ChatLogprobs | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {
        "index": place,
        "delta": delta,
        "logprobs": None if logprobs is None else logprobs.model_dump(),
        "finish_reason": reason,
    }
