"""/v1/responses: answers text or messages in the format of OpenAI's Responses API. The server stores no response."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Response

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers as forms
from longhelix.serve.answer_format import AnswerFormat, Events, data_line
from longhelix.serve.bodies import ResponseBody
from longhelix.serve.driver import RequestGroup
from longhelix.serve.errors import reason, statuses, streamed
from longhelix.serve.reading import AnswerRoute
from longhelix.serve.serving import Serving
from longhelix.serve.streams import answer

_PLAIN: dict[str, Any] = {"format": {"type": "text"}}
# These dicts map the type of an item to the prefix of its id, and to the type of its text in events.
_PREFIXES = {"reasoning": "rs", "message": "msg"}
_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(route_class=AnswerRoute.after(serving.check_open))

    @router.post(
        "/v1/responses", response_model=forms.ResponseObject, responses=statuses(404, 422, 429, 500, 503) | streamed()
    )
    async def respond(body: ResponseBody) -> Response:
        """Answer text or messages in the form of OpenAI's Responses API. The server stores no response."""
        serving.check_model(body.model)
        return answer(*await _submit(serving, body))

    return router


async def _submit(serving: Serving, body: ResponseBody) -> tuple[RequestGroup, "_Format"]:
    # A response contains the settings that it was sampled with, so the model's own are filled in first.
    unset = [name for name in ("temperature", "top_p") if getattr(body, name) is None]
    defaults = serving.sampling_defaults
    body = body.model_copy(update={name: defaults[name] for name in unset if name in defaults})
    before = await serving.context_tokens(body.context)
    field = body.guide_field or "input"
    guide = await serving.guide(body.guide, field)  # before the images, which are slower
    messages = await asyncio.to_thread(body.take_messages)
    prompt = await serving.conversation(body, messages, body.rendering(serving.chat_template_kwargs))
    reasoning = await serving.reasoning(body, prompt)
    guide = await serving.guide_after(reasoning, guide, field)
    requests = serving.requests(
        body,
        [prompt],
        most_tokens=body.max_output_tokens,
        logprobs=None,
        context_tokens=before,
        guide=guide,
        reasoning=reasoning,
    )
    group = await serving.submit(requests)
    return group, _Format(serving, body, requests)


class _Format(AnswerFormat):
    """Writes responses. A response has the reasoning, if any, and one message with one text."""

    prefix, kind, end = "resp_", "response", ""

    body: ResponseBody

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ids = {kind: f"{prefix}_{secrets.token_hex(12)}" for kind, prefix in _PREFIXES.items()}
        self._texts: dict[str, str] = {}  # text so far of each item that has begun, in order
        self._sent = 0

    def whole(self, results: list[Result]) -> forms.ResponseObject:
        (result,) = results
        cut = forms.finish_reason(result) == "length"
        status = "incomplete" if cut else "completed"
        texts = {}
        if result.reasoning and self.body.shows_reasoning:
            texts["reasoning"] = result.reasoning
        if result.text or not texts:
            texts["message"] = result.text
        return self._response(
            status,
            output=self._items(texts, status),
            usage=forms.response_usage(result),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
        )

    def first(self) -> Events:
        response = self._response("in_progress").model_dump()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        if self.requests[0].reasoning is None:
            yield from self._begin("message")

    def events(self, place: int, delta: Delta) -> Events:
        if delta.reasoning and self.body.shows_reasoning:
            yield from self._more("reasoning", delta.reasoning)
        if delta.text:
            yield from self._more("message", delta.text)
        if delta.result is not None:
            yield from self._ending(delta.result)

    def _more(self, kind: str, text: str) -> Iterator[Mapping[str, Any]]:
        """Yield the events for a piece of text. The first piece of an item also begins the item."""
        if kind not in self._texts:
            yield from self._end("completed")
            yield from self._begin(kind)
        self._texts[kind] += text
        logprobs = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{_TEXTS[kind]}.delta", **self._place(kind), delta=text, **logprobs)

    def _begin(self, kind: str) -> Iterator[Mapping[str, Any]]:
        self._texts[kind] = ""
        place, item = self._place(kind), self._item(kind, "in_progress", None).model_dump()
        yield self._event("response.output_item.added", output_index=place["output_index"], item=item)
        yield self._event("response.content_part.added", **place, part=_part(kind, "").model_dump())

    def _end(self, status: str) -> Iterator[Mapping[str, Any]]:
        """Yield the events that end the last item, if there is an item."""
        if not self._texts:
            return
        kind, text = list(self._texts.items())[-1]
        place, item = self._place(kind), self._item(kind, status, text).model_dump()
        logprobs = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{_TEXTS[kind]}.done", **place, text=text, **logprobs)
        yield self._event("response.content_part.done", **place, part=_part(kind, text).model_dump())
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _ending(self, result: Result) -> Iterator[Mapping[str, Any]]:
        whole = self.whole([result])
        if not self._texts:
            yield from self._begin("message")
        yield from self._end(whole.status)
        yield self._event(f"response.{whole.status}", response=whole.model_dump())

    def last(self) -> Events:
        return iter(())

    def line(self, event: Mapping[str, Any]) -> str:
        return f"event: {event['type']}\n{data_line(event)}"

    def error_line(self, error: Exception) -> str:
        failed = self._response("failed", output=self._items(self._texts, "incomplete"), error=reason(error))
        return self.line(self._event("response.failed", response=failed.model_dump()))

    def _event(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        number = self._sent
        self._sent += 1
        return {"type": kind, "sequence_number": number} | fields

    def _place(self, kind: str) -> dict[str, Any]:
        place = list(self._texts).index(kind)
        return {"item_id": self._ids[kind], "output_index": place, "content_index": 0}

    def _items(self, texts: Mapping[str, str], status: str) -> list[forms.OutputItem]:
        """Return the items with these texts.

        Args:
            texts: texts by type of item, in order.
            status: status of the last item. All other items are completed.
        """
        last = len(texts) - 1
        return [
            self._item(kind, status if place == last else "completed", text)
            for place, (kind, text) in enumerate(texts.items())
        ]

    def _item(self, kind: str, status: str, text: str | None) -> forms.OutputItem:
        content = [] if text is None else [_part(kind, text)]
        made = forms.OutputReasoning if kind == "reasoning" else forms.OutputMessage
        return made(id=self._ids[kind], status=status, content=content)

    def _response(self, status: str, **found: Any) -> forms.ResponseObject:
        body = self.body
        return forms.ResponseObject(
            id=self.head["id"],
            created_at=self.head["created"],
            model=self.head["model"],
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            text=_PLAIN if body.text is None else _PLAIN | body.text.model_dump(by_alias=True, exclude_none=True),
            **found,
        )


def _part(kind: str, text: str) -> forms.OutputText | forms.ReasoningTextAnswer:
    return forms.ReasoningTextAnswer(text=text) if kind == "reasoning" else forms.OutputText(text=text)
