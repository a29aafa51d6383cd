"""Tool calls in answers, in OpenAI's format, for complete answers and for streams."""

import secrets
from collections.abc import Iterator
from typing import Any

from longhelix.engine.text.tool_calls import Arguments, ContentDelta, Piece, ToolCalls, ToolCallStart, ToolForm
from longhelix.scheduler.guide import Guide
from longhelix.serve import answers as forms
from longhelix.serve.bodies import ChatBody, Function

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def calling_guide(form: ToolForm, functions: list[Function], body: ChatBody) -> Guide:
    """Return the guide for an answer that must call one or more of `functions`. Raises UserError."""
    schemas = {each.name: _NO_PARAMETERS if each.parameters is None else each.parameters for each in functions}
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    return Guide("grammar", form.lark(schemas, several))


def message(calls: ToolCalls, text: str) -> forms.AssistantMessage | forms.ToolCallingMessage:
    """Split the text of an answer into content and tool calls."""
    contents: list[str] = []
    called: list[forms.AnswerToolCall] = []
    for piece in [*calls.push(text), *calls.finish()]:
        match piece:
            case ContentDelta(more):
                contents.append(more)
            case ToolCallStart(_, name):
                called.append(
                    forms.AnswerToolCall(id=_new_id(), function=forms.AnswerFunctionCall(name=name, arguments=""))
                )
            case Arguments(place, more):
                called[place].function.arguments += more
    content = "".join(contents)
    return (
        forms.ToolCallingMessage(content=content or None, tool_calls=called)
        if called
        else forms.AssistantMessage(content=content)
    )


def deltas(pieces: list[Piece]) -> Iterator[dict[str, Any]]:
    """Yield the `delta` objects of the events for these pieces of an answer."""
    for piece in pieces:
        match piece:
            case ContentDelta(text):
                yield {"content": text}
            case ToolCallStart(place, name):
                function = {"name": name, "arguments": ""}
                yield {"tool_calls": [{"index": place, "id": _new_id(), "type": "function", "function": function}]}
            case Arguments(place, text):
                yield {"tool_calls": [{"index": place, "function": {"arguments": text}}]}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
