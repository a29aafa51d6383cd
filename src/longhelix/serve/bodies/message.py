"""Messages of a conversation: text, images and tool calls."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from longhelix.errors import UserError
from longhelix.serve.bodies.body import Body, Text
from longhelix.serve.bodies.unserved import Unserved, check_unserved
from longhelix.serve.json_reader import JsonBoundsError, JsonReader

# Limits on a conversation. The limits on parts and tool calls apply to the sum over all messages. Validating each item
# blocks the event loop for microseconds.
MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 32_768, 32_768, 128
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]  # name of a function


class TextPart(Body):
    """Text in a message."""

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """Text in which a model refused to answer. The prompt contains this part as normal text."""

    type: Literal["refusal"]
    refusal: Text


# Accepted for compatibility but not used: the model's files define the size of images.
Detail = Literal["auto", "low", "high", "original"]


class ImageUrl(Body):
    """URL of an image."""

    url: Text
    """Data URL of a PNG, JPEG or WebP image."""
    detail: Detail | None = None


class ImagePart(Body):
    """Image in a message."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[Text, Tag("str")] | Annotated[ImageUrl, Tag("object")],
        Discriminator(lambda given: "str" if isinstance(given, str) else "object"),
    ]
    """URL of the image, or an object with the URL."""

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
_Items = TypeVar("_Items")
# The discriminator chooses the type before validation, so that errors are about the type that the client sent.
TextOr = Annotated[
    Annotated[Text, Tag("str")] | Annotated[_Items, Tag("list")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "list"),
]


class FunctionCall(Body):
    """Function that the assistant has called."""

    name: Name
    arguments: Text | dict[str, Any] | None = None
    """Arguments as an object or as JSON text. May be null, missing or empty if the function has no arguments."""


class ToolCall(Body):
    """Tool call of the assistant in a conversation."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self, path: str, reader: JsonReader) -> dict[str, Any]:
        """Return the call for the chat template, with its arguments as an object.

        Args:
            path: path of the call in the body, for error messages.
            reader: parser for the arguments of all calls. All arguments together must stay within its limits.

        Raises:
            UserError: the arguments are not a JSON object.
        """
        arguments, path = self.function.arguments, f"{path}.function.arguments"
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = reader.read(arguments)
            except JsonBoundsError as error:
                raise UserError(
                    f"{path}: the JSON of the arguments, together with the arguments of earlier calls, {error}"
                ) from error
            except ValueError as error:
                raise UserError(f"{path}: the arguments of a call are not JSON ({error}): correct them") from error
        if not isinstance(arguments, dict):
            raise UserError(f"{path}: the arguments of a call are not a JSON object: correct them")
        found = self.model_dump(exclude_none=True)
        return found | {"function": found["function"] | {"arguments": arguments}}


_CONTINUE = Unserved((False,), "set continue_final_message at the top level of the body")
_UNSERVED = {  # unsupported fields of messages
    "prefix": _CONTINUE,
    "partial": _CONTINUE,
    "audio": Unserved((), "give its text as content"),
    "function_call": Unserved((), "use tool_calls"),
}


class Message(Body):
    """Message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """Role that the chat template supports, such as system, user, assistant or tool."""
    content: TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]] | None = None
    """Text, or parts of text and images."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    """Tool calls of the assistant."""
    refusal: Text | None = None
    """Text in which the assistant refused to answer."""
    reasoning_content: Text | None = None
    """Reasoning of the assistant."""
    reasoning: Text | None = None
    """Same as `reasoning_content`, under vLLM's newer name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, _UNSERVED)
        return self

    @property
    def image_urls(self) -> list[str]:
        """URLs of the message's images, in order."""
        if self.content is None or isinstance(self.content, str):
            return []
        return [part.url for part in self.content if isinstance(part, ImagePart)]

    @property
    def num_characters(self) -> int:
        """Total length of the text, reasoning and arguments, which approximates the length of the rendered message."""
        content = self.content or self.refusal or ""
        parts = [content] if isinstance(content, str) else [_text(part) for part in content]
        calls = [call.function.arguments for call in self.tool_calls or ()]
        texts = [*parts, self._any_reasoning, *calls]
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def _any_reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self, path: str, reader: JsonReader | None = None) -> dict[str, Any]:
        """Return the message for the chat template.

        The content is one text, or a list of parts if the message has images. The role `developer` becomes `system`.
        The reasoning is stored under every name that templates use.

        Args:
            path: path of the message in the body, for error messages.
            reader: parser for the arguments of all calls of the conversation, which together must stay within its
                limits.

        Raises:
            UserError: the arguments of a call are not a JSON object.
        """
        reader = JsonReader() if reader is None else reader
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            texts = [_text(part) for part in content]
            content = "".join(text for text in texts if text is not None) if None not in texts else _parts(texts)
        found = self.model_dump(exclude_none=True, exclude={"content", "refusal"}) | {"content": content}
        if self.role == "developer":
            found["role"] = "system"
        reasoning = self._any_reasoning
        if reasoning is not None:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
        if self.tool_calls:
            found["tool_calls"] = [
                call.for_template(f"{path}.tool_calls[{place}]", reader) for place, call in enumerate(self.tool_calls)
            ]
        return found


def _text(part: TextPart | ImagePart | RefusalPart) -> str | None:
    """Return the text of a part, or None for an image."""
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
    return None


def _counted(given: object) -> object:
    """Check the numbers of messages, parts and tool calls before pydantic validates them."""
    if not isinstance(given, list):
        return given
    if len(given) > MOST_MESSAGES:
        raise ValueError(f"there are {len(given)} messages: give at most {MOST_MESSAGES}")
    dicts = [message for message in given if isinstance(message, dict)]
    lists = [message.get(name) for message in dicts for name in ("content", "tool_calls")]
    parts = sum(len(each) for each in lists if isinstance(each, list))
    if parts > MOST_PARTS:
        raise ValueError(f"messages have {parts} parts and tool calls in total: give at most {MOST_PARTS}")
    return given


COUNTED = BeforeValidator(_counted)
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), COUNTED]


def _parts(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """Return parts for the chat template. None represents an image."""
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
