"""Of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from longhelix.scheduler.request import MOST_TOKENS
from longhelix.serve.bodies.body import Body, Text
from longhelix.serve.bodies.message import MOST_TOOLS, Messages, Name
from longhelix.serve.bodies.reasoned import Reasoned
from longhelix.serve.bodies.sampled import ScoredBody
from longhelix.serve.bodies.templated import Effort, Ended, effort_variables

_MOST_TOP_LOGPROBS = 20


class Function(Body):
    """One that the model may call. parameters: a JSON schema of its arguments."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    name: Name


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


# Told apart before it is looked at, as in `TextOr`.
_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[ToolChoice, Tag("object")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "object"),
]


class ChatBody(ScoredBody, Ended, Reasoned):
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    return_token_ids: bool | None = None
    reasoning_effort: Effort | None = None

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
    def offered(self) -> list[Function]:
        """The functions that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def wanted(self) -> list[Function]:
        """Those of which it has to call one; empty where it need not."""
        if isinstance(self.tool_choice, ToolChoice):
            return [function for function in self.offered if function.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
