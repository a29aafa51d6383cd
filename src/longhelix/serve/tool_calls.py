"""What answers call, as OpenAI has it, whole or event by event."""

import secrets
from collections.abc import Iterator
from typing import Any

from longhelix.engine.text.tool_calls import Arguments, ContentDelta, Piece, ToolCalls, ToolCallStart, ToolForm
from longhelix.scheduler.guide import Guide
from longhelix.serve import answers as forms
from longhelix.serve.bodies import ChatBody, Function

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def calling_guide(form: ToolForm, functions: list[Function], body: ChatBody) -> Guide:
    """For answers that call one of `functions`. Raises UserError."""
    schemas = {each.name: _NO_PARAMETERS if each.parameters is None else each.parameters for each in functions}
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    return Guide("grammar", form.lark(schemas, several))


def reply(calls: ToolCalls, text: str) -> forms.Reply | forms.CallingReply:
    """A whole answer."""
    said: list[str] = []
    called: list[forms.Called] = []
    for piece in [*calls.push(text), *calls.finish()]:
        match piece:
            case ContentDelta(more):
                said.append(more)
            case ToolCallStart(_, name):
                called.append(forms.Called(id=_new_id(), function=forms.CalledFunction(name=name, arguments="")))
            case Arguments(place, more):
                called[place].function.arguments += more
    content = "".join(said)
    return forms.CallingReply(content=content or None, tool_calls=called) if called else forms.Reply(content=content)


def deltas(pieces: list[Piece]) -> Iterator[dict[str, Any]]:
    """Of events."""
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
