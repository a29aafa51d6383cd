"""What answers to one call have in common, whole or event by event."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from longhelix.engine.result import Delta, Result
from longhelix.serve import answers
from longhelix.serve.asked import Asked
from longhelix.serve.bodies import Sampled
from longhelix.serve.errors import of_error
from longhelix.serve.json_pieces import json_pieces
from longhelix.serve.serving import Serving

_Value = TypeVar("_Value")
Events = Iterator[Mapping[str, Any]]


# They end lines for clients that look for more ends than events have.
_ENDS_OF_LINES = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def one_line(text: str) -> str:
    """JSON as an event has it."""
    return text if text.isascii() else text.translate(_ENDS_OF_LINES)


def data_line(event: Mapping[str, Any]) -> str:
    return f"data: {one_line(msgspec.json.encode(event).decode())}\n\n"


class Form:
    """How an endpoint writes its answers, whole and streamed.

    kind: type of its events.
    end: last text of a stream.
    is_long: an answer may be long, such as one that echoes its prompt. It is written on a thread of its own.
    keeps_prompts: an answer shows the prompt's token ids, so they are kept until it ends.
    """

    prefix: str
    kind: str
    end = "data: [DONE]\n\n"
    is_long = False

    def __init__(self, serving: Serving, body: Sampled, asked: Sequence[Asked], keeps_prompts: bool = False) -> None:
        self.tokenizer = serving.llm.tokenizer
        self.long_answers = serving.long_answers
        self.body = body
        if body.model_extra:  # what nobody knows may be long
            body.model_extra.clear()
        self.asked = asked if keeps_prompts else [replace(each, prompt=()) for each in asked]
        self.head = {
            "id": f"{self.prefix}{serving.call.id}",
            "created": int(time.time()),
            "model": serving.model,
        }
        self.prompt_tokens = sum(each.num_tokens for each in asked[:: body.choices])
        self._completion_tokens = 0
        self._results: dict[int, Result] = {}

    def whole(self, results: list[Result]) -> BaseModel:
        """The answer in one piece."""
        raise NotImplementedError

    def pieces(self, results: list[Result]) -> Iterator[bytes]:
        """The same as JSON, piece by piece."""
        yield self.whole(results).model_dump_json().encode()

    async def make(self, do: Callable[..., _Value], *given: object) -> _Value:
        """What `do` makes of `given`, off the event loop. Raises OverloadedError."""
        if self.is_long:
            return await self.long_answers.run(do, *given)
        return await asyncio.to_thread(do, *given)

    def first(self) -> Events:
        """Before anything has come."""
        return iter(())

    def events(self, place: int, delta: Delta) -> Events:
        """Those of what a request got."""
        self._completion_tokens += delta.token_id is not None
        if delta.result is not None:
            self._results[place] = delta.result
        for choice in self.choices(place, delta):
            yield self.event([choice])

    def line(self, event: Mapping[str, Any]) -> str:
        """An event as a stream has it."""
        return data_line(event)

    def pieces_of_line(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """The same of a long event."""
        yield b"data: "
        for piece in json_pieces(event):
            yield one_line(piece.decode()).encode()
        yield b"\n\n"

    def error_line(self, error: Exception) -> str:
        """What ends a stream before its time."""
        return f"data: {one_line(bytes(of_error(error).body).decode())}\n\n"

    def choices(self, place: int, delta: Delta) -> Iterator[Mapping[str, Any]]:
        """The same, without what all events have."""
        raise NotImplementedError

    def event(self, choices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        found = self.head | {"object": self.kind, "choices": choices}
        if self.body.asks_for("include_usage"):
            found["usage"] = None  # the last event has it, and all have the field, as OpenAI says
        if self.body.asks_for("continuous_usage_stats"):
            found["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self._completion_tokens,
                "total_tokens": self.prompt_tokens + self._completion_tokens,
            }
        return found

    def last(self) -> Events:
        """After all results."""
        if self.body.asks_for("include_usage"):
            results = [self._results[place] for place in sorted(self._results)]
            usage = answers.usage(results, self.body.choices).model_dump()
            yield self.head | {"object": self.kind, "choices": [], "usage": usage}
