"""/v1/chat/completions: the next message of a conversation."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response

from longhelix.engine.result import Delta, Result
from longhelix.engine.text.tool_calls import ToolCalls, ToolForm
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.serve import answers as forms
from longhelix.serve.answer_format import AnswerFormat, Events
from longhelix.serve.bodies import ChatBody
from longhelix.serve.driver import RequestGroup
from longhelix.serve.engine_request import EngineRequest
from longhelix.serve.errors import NO_TOOLS, ClientError, statuses, streamed
from longhelix.serve.reading import AnswerRoute
from longhelix.serve.serving import Serving
from longhelix.serve.streams import answer
from longhelix.serve.token_logprobs import bytes_of_tokens, chat_logprobs, prompt_logprobs
from longhelix.serve.tool_calls import calling_guide, deltas, message


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(route_class=AnswerRoute.after(serving.check_open))

    @router.post(
        "/v1/chat/completions",
        response_model=forms.ChatCompletion,
        responses=statuses(404, 422, 429, 500, 503) | streamed(),
    )
    async def chat(body: ChatBody) -> Response:
        """Write the next message of a conversation."""
        serving.check_model(body.model)
        if body.num_logprobs is not None:
            await asyncio.to_thread(bytes_of_tokens, serving.llm.tokenizer)
        return answer(*await _submit(serving, body))

    return router


async def _submit(serving: Serving, body: ChatBody) -> tuple[RequestGroup, "_Format"]:
    before = await serving.context_tokens(body.context)
    calls = serving.llm.tokenizer.tool_form if body.offered_functions else None
    if body.offered_functions and calls is None:
        raise ClientError(NO_TOOLS, "tools")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.offered_functions else None
    field = body.guide_field or "tools"
    guide = await serving.guide(lambda: _guide(body, calls), field)  # before the images, which are slower
    prompt = await serving.conversation(body, body.messages, body.rendering(serving.chat_template_kwargs), tools)
    reasoning = await serving.reasoning(body, prompt)
    guide = await serving.guide_after(reasoning, guide, field)
    requests = serving.requests(
        body,
        [prompt],
        most_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        context_tokens=before,
        guide=guide,
        reasoning=reasoning,
    )
    group = await serving.submit(requests)
    return group, _Format(serving, body, requests, calls)


def _guide(body: ChatBody, form: ToolForm | None) -> Guide | None:
    """Return the guide of the answer. Raises UserError for an invalid guide."""
    guide = body.guide()
    if guide is not None and form is not None:
        raise UserError(
            "tools cannot be combined with a guided answer: leave out tools, or the field that guides the answer"
        )
    return guide if form is None or not body.required_functions else calling_guide(form, body.required_functions, body)


class _Format(AnswerFormat):
    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    body: ChatBody

    def __init__(
        self, serving: Serving, body: ChatBody, requests: Sequence[EngineRequest], calls: ToolForm | None
    ) -> None:
        super().__init__(serving, body, requests)
        self.is_long = body.prompt_logprobs is not None
        self._form_of_calls = calls
        self._calls: dict[int, ToolCalls] = {}  # parsers for streamed answers, by index of the request

    def whole(self, results: list[Result]) -> forms.ChatCompletion:
        choices = []
        for place, result in enumerate(results):
            calls = self._new_calls()
            token_ids, logprobs = forms.new_tokens(result, with_ending=bool(self.body.return_token_ids))
            reply = forms.AssistantMessage(content=result.text) if calls is None else message(calls, result.text)
            if result.reasoning and self.body.shows_reasoning:
                reply.reasoning_content = reply.reasoning = result.reasoning
                reply.content = reply.content or None
            choices.append(
                forms.ChatChoice(
                    index=place,
                    message=reply,
                    token_ids=token_ids if self.body.return_token_ids else None,
                    logprobs=self._logprobs(token_ids, logprobs),
                    finish_reason=_reason(result, calls),
                )
            )
        scored = prompt_logprobs(self.tokenizer, results[0].prompt_logprobs or (), self.body.prompt_logprobs)
        usage = forms.usage(results, self.body.choices)
        return forms.ChatCompletion(**self.head, choices=choices, usage=usage, prompt_logprobs=scored)

    def first(self) -> Events:
        for place in range(self.body.choices):
            yield self.event([_choice(place, {"role": "assistant", "content": ""})])

    def choices(self, place: int, delta: Delta) -> Iterator[Mapping[str, Any]]:
        logprobs = None
        if delta.token_id is not None and delta.logprobs is not None:
            logprobs = self._logprobs([delta.token_id], [delta.logprobs])
        calls = self._calls_of(place)
        reasoning = delta.reasoning if self.body.shows_reasoning else None
        told: list[Mapping[str, Any]] = [_reasoned(reasoning)] if reasoning else []
        told += [{"content": delta.text}] if calls is None and delta.text else []
        if calls is not None:
            told += deltas(calls.push(delta.text) + (calls.finish() if delta.result is not None else []))
        of_token = {} if logprobs is None else {"logprobs": logprobs.model_dump()}
        if self.body.return_token_ids and delta.token_id is not None:
            of_token["token_ids"] = [delta.token_id]
        if of_token and not told:
            told = [{"content": ""} if reasoning is None else _reasoned("")]
        for one in told:
            yield _choice(place, one, of_token)
            of_token = {}  # only the first event of a token has its id and log-probabilities
        if delta.result is not None:
            yield _choice(place, {}, self._of_ending(delta.result), _reason(delta.result, calls))

    def _of_ending(self, result: Result) -> dict[str, Any]:
        """Return the fields about the token that ended the answer. The last event contains them."""
        if not self.body.return_token_ids or result.ending_token_id is None:
            return {}
        found: dict[str, Any] = {"token_ids": [result.ending_token_id]}
        if result.ending_logprobs is not None:
            logprobs = self._logprobs([result.ending_token_id], [result.ending_logprobs])
            found["logprobs"] = None if logprobs is None else logprobs.model_dump()
        return found

    def _calls_of(self, place: int) -> ToolCalls | None:
        if place not in self._calls:
            calls = self._new_calls()
            if calls is None:
                return None
            self._calls[place] = calls
        return self._calls[place]

    def _new_calls(self) -> ToolCalls | None:
        """Return a parser of tool calls, or None if the answer cannot contain tool calls."""
        if self._form_of_calls is None:
            return None
        names = {function.name for function in self.body.offered_functions}
        return ToolCalls(self._form_of_calls, names, several=self.body.parallel_tool_calls is not False)

    def _logprobs(self, token_ids: list[int], logprobs: list[dict[int, float]] | None) -> forms.ChatLogprobs | None:
        num_best = self.body.num_logprobs
        if num_best is None or logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, token_ids, logprobs, num_best)


def _reason(result: Result, calls: ToolCalls | None) -> str:
    """Return the finish reason of an answer that has been parsed completely."""
    reason = forms.finish_reason(result)
    return "tool_calls" if reason == "stop" and calls is not None and calls.num_calls else reason


def _reasoned(reasoning: str) -> dict[str, str]:
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _choice(
    place: int, delta: Mapping[str, Any], of_token: Mapping[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason} | dict(of_token or {})
