"""Request body of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from longhelix.scheduler.request import MOST_TOKENS
from longhelix.serve.bodies.body import Body, Text
from longhelix.serve.bodies.message import MOST_TOOLS, Messages, Name
from longhelix.serve.bodies.reasoned import ReasonedBody
from longhelix.serve.bodies.sampled import ScoredBody
from longhelix.serve.bodies.templated import Effort, PromptEndingBody, effort_variables

_MOST_TOP_LOGPROBS = 20


class Function(Body):
    """Function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""


class Tool(Body):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    """Name of a function."""

    name: Name


class ToolChoice(Body):
    """Tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


# The discriminator chooses the type before validation, as in `TextOr`.
_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[ToolChoice, Tag("object")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "object"),
]


class ChatBody(ScoredBody, PromptEndingBody, ReasonedBody):
    """Request for the next message of a conversation."""

    prompt_field = "messages"

    messages: Messages
    """The conversation."""
    max_completion_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    """Maximum number of new tokens; by default, as many as fit in the model's context."""
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    """Older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Return the log-probability of each new token."""
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_LOGPROBS)] | None = None
    """Number of likeliest tokens to return for each new token. Requires logprobs."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: _ToolChoice | None = None
    """`none` forbids calls, `auto` lets the model decide, and `required` forces at least one call.

    An object names the function that the model must call.
    """
    parallel_tool_calls: bool | None = None
    """Allow several tool calls in one answer; true by default."""
    return_token_ids: bool | None = None
    """Return the ids of the new tokens and of the token that ended the answer."""
    reasoning_effort: Effort | None = None
    """Reasoning effort. Only chat templates with a variable for the effort use this field."""

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs: set logprobs to true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name: give each tool its own name")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice requires a call, but there are no tools: add tools, or leave out tool_choice")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name}, which is not one of the tools")
        return self

    def _effort(self) -> Mapping[str, Any]:
        return effort_variables(self.reasoning_effort)

    @property
    def offered_functions(self) -> list[Function]:
        """The functions that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def required_functions(self) -> list[Function]:
        """The functions that the model must choose from; empty if the model need not call a function."""
        if isinstance(self.tool_choice, ToolChoice):
            return [function for function in self.offered_functions if function.name == self.tool_choice.function.name]
        return self.offered_functions if self.tool_choice == "required" else []

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
