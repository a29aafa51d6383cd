"""/v1/responses: an answer to text or messages, in the form of OpenAI's newer interface. None is kept."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Response

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers as forms
from longhelix.serve.bodies import ResponseBody
from longhelix.serve.driver import Answers
from longhelix.serve.errors import reason, statuses, streamed
from longhelix.serve.form import Events, Form, data_line
from longhelix.serve.reading import AnswerRoute
from longhelix.serve.serving import Serving
from longhelix.serve.streams import answer

_PLAIN: dict[str, Any] = {"format": {"type": "text"}}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(route_class=AnswerRoute.after(serving.check_open))

    @router.post(
        "/v1/responses", response_model=forms.ResponseObject, responses=statuses(404, 422, 429, 500, 503) | streamed()
    )
    async def respond(body: ResponseBody) -> Response:
        serving.check_model(body.model)
        return answer(*await _ask(serving, body))

    return router


async def _ask(serving: Serving, body: ResponseBody) -> tuple[Answers, "_Form"]:
    before = await serving.context_tokens(body.context)
    guide = await serving.guide(body.guide, body.guide_field)  # images take longer
    messages = await asyncio.to_thread(body.take_messages)
    prompt = await serving.conversation(body, messages, body.rendering(serving.chat_template_kwargs))
    asked = serving.requests(body, [prompt], body.max_output_tokens, None, before, guide)
    answers = await serving.ask(asked)
    return answers, _Form(serving, body, asked)


class _Form(Form):
    """One message with one text."""

    prefix, kind, end = "resp_", "response", ""

    body: ResponseBody

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._text = ""
        self._sent = 0

    def whole(self, results: list[Result]) -> forms.ResponseObject:
        (result,) = results
        cut = forms.finish_reason(result) == "length"
        status = "incomplete" if cut else "completed"
        return self._response(
            status,
            output=[self._item(status, result.text)],
            usage=forms.response_usage(result),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
        )

    def first(self) -> Events:
        response = self._response("in_progress").model_dump()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = self._item("in_progress", None).model_dump()
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_part("").model_dump())

    def events(self, place: int, delta: Delta) -> Events:
        self._text += delta.text
        if delta.text:
            yield self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=[])
        if delta.result is not None:
            yield from self._ending(delta.result)

    def _ending(self, result: Result) -> Iterator[Mapping[str, Any]]:
        whole = self.whole([result])
        (item,) = whole.output
        yield self._event("response.output_text.done", **self._place, text=result.text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_part(result.text).model_dump())
        yield self._event("response.output_item.done", output_index=0, item=item.model_dump())
        yield self._event(f"response.{whole.status}", response=whole.model_dump())

    def last(self) -> Events:
        return iter(())

    def line(self, event: Mapping[str, Any]) -> str:
        return f"event: {event['type']}\n{data_line(event)}"

    def error_line(self, error: Exception) -> str:
        failed = self._response("failed", output=[self._item("incomplete", self._text)], error=reason(error))
        return self.line(self._event("response.failed", response=failed.model_dump()))

    def _event(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        number = self._sent
        self._sent += 1
        return {"type": kind, "sequence_number": number} | fields

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, text: str | None) -> forms.OutputMessage:
        content = [] if text is None else [_part(text)]
        return forms.OutputMessage(id=self._item_id, status=status, content=content)

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


def _part(text: str) -> forms.OutputText:
    return forms.OutputText(text=text)
