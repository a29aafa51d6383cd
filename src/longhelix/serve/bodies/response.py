"""Request body of /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.serve.bodies.body import Body, Text, check_quoted, few
from longhelix.serve.bodies.message import (
    COUNTED,
    MOST_MESSAGES,
    MOST_PARTS,
    Detail,
    ImagePart,
    ImageUrl,
    Message,
    RefusalPart,
    TextOr,
    TextPart,
)
from longhelix.serve.bodies.reasoned import ReasonedBody
from longhelix.serve.bodies.sampled import SampledBody
from longhelix.serve.bodies.templated import Effort, PromptEndingBody, effort_variables
from longhelix.serve.bodies.unserved import UNSERVED, Unserved, check_unserved

_MOST_METADATA = 16  # OpenAI's limit
_WHOLE = Unserved((), "responses are not stored, so send the whole conversation as input")
_UNSERVED = UNSERVED | {
    "store": Unserved((False,), "responses are not stored, so set it to false"),
    "previous_response_id": _WHOLE,
    "previous_response": _WHOLE,
    "previous_input_messages": _WHOLE,
    "conversation": _WHOLE,
    "context_management": _WHOLE,
    "messages": Unserved((), "use input"),
    "prompt": Unserved((), "use input"),
    "max_completion_tokens": Unserved((), "use max_output_tokens"),
    "top_logprobs": Unserved((0,), "use /v1/chat/completions"),
    "background": Unserved((False,)),
    "include": Unserved(([],)),
    "truncation": Unserved(("disabled",), "shorten the input"),
    "image": Unserved(),
}


class InputText(Body):
    """Text in a message."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputImage(Body):
    """Image in a message."""

    type: Literal["input_image"]
    image_url: Text
    """Data URL of a PNG, JPEG or WebP image."""
    detail: Detail | None = None


InputPart = Annotated[InputText | InputImage | RefusalPart, Field(discriminator="type")]


class ReasoningText(Body):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """Reasoning of an earlier response. It belongs to the assistant message that follows."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class InputMessage(Body):
    """Message of the conversation: a new message, or a message from the output of an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[Annotated[list[InputPart], Field(max_length=MOST_PARTS, fail_fast=True)]]

    def as_message(self, reasoning: str = "") -> Message:
        """Return the message in the format of /v1/chat/completions."""
        content = self.content if isinstance(self.content, str) else [_chat_part(part) for part in self.content]
        if reasoning and self.role == "assistant":
            return Message(role=self.role, content=content, reasoning_content=reasoning)
        return Message(role=self.role, content=content)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")] | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        lambda given: "reasoning" if isinstance(given, dict) and given.get("type") == "reasoning" else "message"
    ),
]


def _chat_part(part: InputText | InputImage | RefusalPart) -> TextPart | ImagePart | RefusalPart:
    if isinstance(part, RefusalPart):
        return part
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


class TextFormat(Body):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """JSON schema of the answer, for the type `json_schema`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.content is not None):
            raise ValueError("schema is required if type is json_schema, and not allowed otherwise")
        check_quoted(self.model_extra)
        return self

    def guide(self) -> Guide | None:
        """Return the guide, or None for text. Raises UserError for an invalid schema."""
        if self.content is not None:
            return Guide.of_schema(self.content)
        return Guide("json") if self.type == "json_object" else None


class TextOptions(Body):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    """Format of the answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_unserved(self.model_extra, {"verbosity": UNSERVED["verbosity"]})
        check_quoted(self.model_extra)
        return self


class ReasoningOptions(Body):
    """Options for the reasoning."""

    effort: Effort | None = None
    """Reasoning effort. Only chat templates with a variable for the effort use this field."""
    summary: Literal["auto"] | None = None
    """Has no effect: the reasoning is never summarized."""


class ResponseBody(SampledBody, PromptEndingBody, ReasonedBody):
    """Request for an answer to text or messages."""

    prompt_field, limit_field = "input", "max_output_tokens"
    guide_fields = ("text", *SampledBody.guide_fields)
    unserved = _UNSERVED

    n: Annotated[int, Field(ge=1, le=1)] | None = None  # a Literal would also accept true and 1.0
    input: TextOr[Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), COUNTED]]
    """Text, or the messages of a conversation."""
    instructions: Text | None = None
    """System message before the conversation."""
    text: TextOptions | None = None
    """Options for the text of the answer."""
    reasoning: ReasoningOptions | None = None
    """Options for the reasoning."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """Maximum number of new tokens; by default, as many as fit in the model's context."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MOST_METADATA),
            few(_MOST_METADATA),
        ]
        | None
    ) = None

    def _effort(self) -> Mapping[str, Any]:
        return effort_variables(None if self.reasoning is None else self.reasoning.effort)

    def guides(self) -> list[Guide]:
        asked = None if self.text is None or self.text.format is None else self.text.format.guide()
        return super().guides() if asked is None else [asked, *super().guides()]

    def take_messages(self) -> list[Message]:
        """Return the conversation and remove it from the body."""
        told = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*told, Message(role="user", content=self.input)]
        reasoning = ""
        for item in self.input:
            if isinstance(item, InputReasoning):
                reasoning += item.text
            else:
                told.append(item.as_message(reasoning))
                reasoning = ""
        self.input.clear()
        return told
