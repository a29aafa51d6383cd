"""Messages of a conversation: text, images, calls of tools."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from longhelix.errors import UserError
from longhelix.serve.bodies.body import Body, Text

# Of a conversation: parts and calls of all messages together. Each takes microseconds of the event loop.
MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 32_768, 32_768, 128
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]  # of a function


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    """detail: images are shown as the model scales them, which is the highest."""

    url: Text
    detail: Literal["auto", "high"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
_Items = TypeVar("_Items")
# Told apart before they are looked at, or what is wrong with one would be said of the other.
TextOr = Annotated[
    Annotated[Text, Tag("str")] | Annotated[_Items, Tag("list")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "list"),
]


class FunctionCall(Body):
    name: Name
    arguments: Text | dict[str, Any]


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With its arguments as an object, which templates write as JSON. Raises UserError."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise UserError(f"messages have a call whose arguments are not JSON ({error}): correct it") from error
        if not isinstance(arguments, dict):
            raise UserError("messages have a call whose arguments are no JSON object: correct it")
        found = self.model_dump(exclude_none=True)
        return found | {"function": found["function"] | {"arguments": arguments}}


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None

    @property
    def image_urls(self) -> list[str]:
        """Of the images that it shows, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: text in one piece, and where there are images, parts, with a place for each. They
        know a developer's messages as the system's. Raises UserError."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = [part.text if isinstance(part, TextPart) else None for part in content]
            content = "".join(text for text in texts if text is not None) if None not in texts else _parts(texts)
        found = self.model_dump(exclude_none=True, exclude={"content"}) | {"content": content}
        if self.role == "developer":
            found["role"] = "system"
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found


def _counted(given: object) -> object:
    """Counts messages, and what they have, before any is looked at."""
    if not isinstance(given, list):
        return given
    if len(given) > MOST_MESSAGES:
        raise ValueError(f"there are {len(given)} messages: give at most {MOST_MESSAGES}")
    dicts = [message for message in given if isinstance(message, dict)]
    lists = [message.get(name) for message in dicts for name in ("content", "tool_calls")]
    parts = sum(len(each) for each in lists if isinstance(each, list))
    if parts > MOST_PARTS:
        raise ValueError(f"messages have {parts} parts and calls together: give at most {MOST_PARTS}")
    return given


COUNTED = BeforeValidator(_counted)
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), COUNTED]


def _parts(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """None: an image."""
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
