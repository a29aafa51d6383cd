"""Messages of a conversation: text, images, calls of tools."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from longhelix.errors import UserError
from longhelix.serve.bodies.body import Body, Text
from longhelix.serve.bodies.unserved import Unserved, check_unserved
from longhelix.serve.json_reader import JsonBoundsError, JsonReader

# Of a conversation: parts and calls of all messages together. Each takes microseconds of the event loop.
MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 32_768, 32_768, 128
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]  # of a function


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """What a model said in place of an answer, which stays what it said."""

    type: Literal["refusal"]
    refusal: Text


# Images are always shown at the size that the model's own files say.
Detail = Literal["auto", "low", "high", "original"]


class ImageUrl(Body):
    url: Text
    detail: Detail | None = None


class ImagePart(Body):
    """image_url: a string in place of an object is its URL."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[Text, Tag("str")] | Annotated[ImageUrl, Tag("object")],
        Discriminator(lambda given: "str" if isinstance(given, str) else "object"),
    ]

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
_Items = TypeVar("_Items")
# Told apart before they are looked at, or what is wrong with one would be said of the other.
TextOr = Annotated[
    Annotated[Text, Tag("str")] | Annotated[_Items, Tag("list")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "list"),
]


class FunctionCall(Body):
    """arguments: an object, or its JSON. Of a function without any, clients send null or nothing, too."""

    name: Name
    arguments: Text | dict[str, Any] | None = None


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self, path: str, reader: JsonReader) -> dict[str, Any]:
        """With its arguments as an object, which templates write as JSON. path: its place in the body. reader: of the
        arguments of all calls. Raises UserError."""
        arguments, path = self.function.arguments, f"{path}.function.arguments"
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = reader.read(arguments)
            except JsonBoundsError as error:
                raise UserError(
                    f"{path}: a call whose arguments are JSON that, with the calls before it, {error}"
                ) from error
            except ValueError as error:
                raise UserError(f"{path}: a call whose arguments are not JSON ({error}): correct it") from error
        if not isinstance(arguments, dict):
            raise UserError(f"{path}: a call whose arguments are no JSON object: correct it")
        found = self.model_dump(exclude_none=True)
        return found | {"function": found["function"] | {"arguments": arguments}}


_CONTINUE = Unserved((False,), "set continue_final_message beside messages")
_UNSERVED = {  # of messages
    "prefix": _CONTINUE,
    "partial": _CONTINUE,
    "audio": Unserved((), "give its text as content"),
    "function_call": Unserved((), "use tool_calls"),
}


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, _UNSERVED)
        return self

    @property
    def image_urls(self) -> list[str]:
        """Of the images that it shows, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part.url for part in self.content if isinstance(part, ImagePart)]

    @property
    def num_characters(self) -> int:
        """Of its text, its reasoning and the calls' arguments, about as many as a chat template makes of them."""
        content = self.content or self.refusal or ""
        parts = [content] if isinstance(content, str) else [_text(part) for part in content]
        calls = [call.function.arguments for call in self.tool_calls or ()]
        texts = [*parts, self._told_reasoning, *calls]
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def _told_reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self, path: str, reader: JsonReader | None = None) -> dict[str, Any]:
        """As chat templates take it: text in one piece, and where there are images, parts, with a place for each. They
        know a developer's messages as the system's, and reasoning by several names. path: its place in the body.
        reader: of the arguments of a conversation's calls. Raises UserError."""
        reader = JsonReader() if reader is None else reader
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            texts = [_text(part) for part in content]
            content = "".join(text for text in texts if text is not None) if None not in texts else _parts(texts)
        found = self.model_dump(exclude_none=True, exclude={"content", "refusal"}) | {"content": content}
        if self.role == "developer":
            found["role"] = "system"
        reasoning = self._told_reasoning
        if reasoning is not None:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
        if self.tool_calls:
            found["tool_calls"] = [
                call.for_template(f"{path}.tool_calls[{place}]", reader) for place, call in enumerate(self.tool_calls)
            ]
        return found


def _text(part: TextPart | ImagePart | RefusalPart) -> str | None:
    """None: an image."""
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
    return None


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
