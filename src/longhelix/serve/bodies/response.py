"""Of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from longhelix.request import MOST_TOKENS
from longhelix.serve.bodies.body import Body, Text, few
from longhelix.serve.bodies.message import (
    COUNTED,
    MOST_MESSAGES,
    MOST_PARTS,
    ImagePart,
    ImageUrl,
    Message,
    TextOr,
    TextPart,
)
from longhelix.serve.bodies.sampled import NOT_HERE, Sampled

# As NOT_HERE says it; and none is kept.
_NOT_IN_RESPONSES: dict[str, tuple[Any, ...]] = NOT_HERE | {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "echo": (False,),
}


_MOST_METADATA = 16  # as OpenAI has it
_WHOLE = "no response is kept, so send the whole conversation as input"
_NOTHING_KEPT = {
    "store": "no response is kept, so set it to false",
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
}


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: Text


class InputImage(Body):
    """image_url: as in `ImageUrl`."""

    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto", "high"] | None = None


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class InputMessage(Body):
    """A message of before, or of now; what a response had as its output is one."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[Annotated[list[InputPart], Field(max_length=MOST_PARTS, fail_fast=True)]]

    def as_message(self) -> Message:
        """As chats have it."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[_chat_part(part) for part in self.content])


def _chat_part(part: InputText | InputImage) -> TextPart | ImagePart:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


class ResponseBody(Sampled):
    prompt_field, limit_field = "input", "max_output_tokens"
    not_here = _NOT_IN_RESPONSES
    instead = _NOTHING_KEPT

    n: Annotated[int, Field(ge=1, le=1)] | None = None  # a Literal takes true and 1.0, too
    input: TextOr[Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), COUNTED]]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MOST_METADATA),
            few(_MOST_METADATA),
        ]
        | None
    ) = None

    def take_messages(self) -> list[Message]:
        """The conversation that is to be answered, which is not kept here."""
        told = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*told, Message(role="user", content=self.input)]
        messages = [each.as_message() for each in self.input]
        self.input.clear()
        return told + messages
