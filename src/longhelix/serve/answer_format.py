"""Base class that writes an endpoint's answers as one JSON document or as server-sent events."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers
from longhelix.serve.bodies import SampledBody
from longhelix.serve.engine_request import EngineRequest
from longhelix.serve.errors import response_for
from longhelix.serve.json_pieces import json_pieces
from longhelix.serve.serving import Serving

_Value = TypeVar("_Value")
Events = Iterator[Mapping[str, Any]]


# Some clients also split lines at these characters, although the standard for server-sent events does not.
_ENDS_OF_LINES = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def one_line(text: str) -> str:
    """Escape JSON so that no client splits it into several lines."""
    return text if text.isascii() else text.translate(_ENDS_OF_LINES)


def data_line(event: Mapping[str, Any]) -> str:
    """Return the `data:` line of a server-sent event, with the blank line that ends the event."""
    return f"data: {one_line(msgspec.json.encode(event).decode())}\n\n"


class AnswerFormat:
    """Writes the answers of an endpoint, as one JSON document or as a stream of events.

    Args:
        serving: the server.
        body: the request body.
        requests: the engine requests made from the body.
        keeps_prompts: keep the token ids of the prompts until the answer ends, because the answer shows them.
    """

    prefix: str  # prefix of the answer's id
    kind: str  # value of `object` in the events
    end = "data: [DONE]\n\n"  # the last line of a stream
    is_long = False  # True if the answer may be long, for example because it echoes the prompt

    def __init__(
        self, serving: Serving, body: SampledBody, requests: Sequence[EngineRequest], keeps_prompts: bool = False
    ) -> None:
        self.tokenizer = serving.llm.tokenizer
        self.long_answers = serving.long_answers
        self.body = body
        if body.model_extra:  # unknown fields may be large, and nothing reads them
            body.model_extra.clear()
        self.requests = requests if keeps_prompts else [replace(each, prompt=()) for each in requests]
        self.head = {
            "id": f"{self.prefix}{serving.call.id}",
            "created": int(time.time()),
            "model": serving.model,
        }
        self.prompt_tokens = sum(each.num_tokens for each in requests[:: body.choices])
        self._completion_tokens = 0
        self._results: dict[int, Result] = {}

    def whole(self, results: list[Result]) -> BaseModel:
        """Return the complete answer."""
        raise NotImplementedError

    def pieces(self, results: list[Result]) -> Iterator[bytes]:
        """Yield the JSON of the complete answer in pieces."""
        yield self.whole(results).model_dump_json().encode()

    async def run(self, do: Callable[..., _Value], *given: object) -> _Value:
        """Call `do(*given)` on a thread and return its result. Raises OverloadedError.

        Long answers share one thread.
        """
        if self.is_long:
            return await self.long_answers.run(do, *given)
        return await asyncio.to_thread(do, *given)

    def first(self) -> Events:
        """Return the events before the first token."""
        return iter(())

    def events(self, place: int, delta: Delta) -> Events:
        """Yield the events of a delta.

        Args:
            place: index of the request.
            delta: the request's new token, text or result.
        """
        self._completion_tokens += delta.token_id is not None
        if delta.result is not None:
            self._results[place] = delta.result
        for choice in self.choices(place, delta):
            yield self.event([choice])

    def line(self, event: Mapping[str, Any]) -> str:
        """Return the text of an event in the stream."""
        return data_line(event)

    def event_line_pieces(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the text of a long event in pieces."""
        yield b"data: "
        for piece in json_pieces(event):
            yield one_line(piece.decode()).encode()
        yield b"\n\n"

    def error_line(self, error: Exception) -> str:
        """Return the text of the event that reports an error and ends the stream."""
        return f"data: {one_line(bytes(response_for(error).body).decode())}\n\n"

    def choices(self, place: int, delta: Delta) -> Iterator[Mapping[str, Any]]:
        """Yield the `choices` entry of each event of a delta."""
        raise NotImplementedError

    def event(self, choices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return an event with the fields that all events have."""
        found = self.head | {"object": self.kind, "choices": choices}
        if self.body.asks_for("include_usage"):
            found["usage"] = None  # OpenAI sends null in every event except the last
        if self.body.asks_for("continuous_usage_stats"):
            found["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self._completion_tokens,
                "total_tokens": self.prompt_tokens + self._completion_tokens,
            }
        return found

    def last(self) -> Events:
        """Yield the events after all results."""
        if self.body.asks_for("include_usage"):
            results = [self._results[place] for place in sorted(self._results)]
            usage = answers.usage(results, self.body.choices).model_dump()
            yield self.head | {"object": self.kind, "choices": [], "usage": usage}
