"""Renders messages to prompt text with the model's own chat template."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longhelix.engine.text.tool_calls import ToolForm, form_of
from longhelix.errors import UserError
from longhelix.values import entries, text

# Example messages before the messages of `render_more`. Templates expect users and assistants to take turns, and some
# templates support no system prompt.
_USER, _ASSISTANT = {"role": "user", "content": "."}, {"role": "assistant", "content": "."}
_EARLIER = ([_USER, _ASSISTANT], [_USER], [{"role": "system", "content": "."}])


# The trailing space shows whether a template trims the ends of messages.
_MARK = "LONGHELIX_CONTINUES_HERE "
_MOST_VARIABLES = 64
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class ChatTemplate:
    """A Jinja template from a checkpoint. It is untrusted code, so it is rendered in a sandbox.

    Args:
        source: the template.
        special_tokens: special tokens that the template may use as variables, such as `bos_token` and `eos_token`.
        tool_source: the template for conversations with tools, if the checkpoint has a separate template for them.

    Attributes:
        check_length: called with the number of characters rendered so far. An exception that it raises ends the
            rendering.
    """

    check_length: Callable[[int], None] = staticmethod(lambda num_characters: None)

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source
        self._tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls. None if the template supports no tools or the form is unknown."""
        try:
            names = meta.find_undeclared_variables(self._environment.parse(self._tool_source))
        except TemplateError:  # `render` reports the error
            return None
        return form_of(self._tool_source) if "tools" in names else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation with the template and return the prompt.

        Args:
            messages: the messages, in OpenAI's format.
            tools: the functions that the assistant may call, in OpenAI's format.
            variables: additional variables for the template, such as enable_thinking.
            add_generation_prompt: whether to end the prompt with the beginning of the assistant's next message
                instead of the end of the last message.
            continue_final_message: whether to end the prompt inside the last message, so the answer continues it.

        Raises:
            UserError: the template failed on the messages.
        """
        if continue_final_message:
            return self._open_ended(messages, tools, variables)
        try:
            template = self._template if tools is None else self._tool_template
            pieces = template.generate(
                # Templates compare `documents` with none, and an undefined name is not equal to none.
                {"documents": None}
                | self._special_tokens
                | checked_variables(variables)
                | {
                    "messages": [dict(message) for message in messages],
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            return "".join(self._counted(pieces))
        except UserError:
            raise
        except Exception as error:  # expressions in a template can raise any exception
            raise UserError(
                f"the model's chat template failed on these messages ({error}): "
                "change the messages, or use generate without --chat",
                code="chat_template_failed",
            ) from error

    def _open_ended(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """Return the prompt up to the end of the last message's text.

        The template renders the message with a mark after its text. The mark and the text after it are then removed.
        """
        marked, said = _marked(messages[-1]) if messages else ({}, None)
        if said is None:
            raise UserError("continue_final_message is set, but the last message has no text: add text to it")
        rendered = self.render([*messages[:-1], marked], tools, variables, add_generation_prompt=False)
        end = rendered.rfind(_MARK.strip())
        if end < 0 or said.strip() not in rendered[:end]:
            raise UserError(
                "continue_final_message is set, but the model's chat template changes the text of the last message: "
                "change that message, or leave out continue_final_message"
            )
        # If the template trims the ends of messages, it has also trimmed the space at the end of the mark.
        return rendered[:end] if rendered.startswith(_MARK, end) else rendered[:end].rstrip()

    def render_more(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None, **ending: bool
    ) -> str:
        """Render messages that follow other messages.

        Unlike `render`, this method omits text that begins a conversation, such as a BOS or a default system prompt.

        Args:
            messages: the messages, in OpenAI's format.
            variables: as in `render`.
            ending: `add_generation_prompt` and `continue_final_message`, as in `render`.

        Raises:
            UserError: the template can render these messages only at the beginning of a conversation.
        """
        for before in _EARLIER:
            try:
                begun = self.render(before, variables=variables, add_generation_prompt=False)
                whole = self.render([*before, *messages], variables=variables, **ending)
            except UserError as error:
                if error.code != "chat_template_failed":
                    raise
                continue  # the template does not allow the messages after these; try the next ones
            if whole.startswith(begun):
                return whole[len(begun) :]
        raise UserError(
            "the model's chat template cannot render these messages after other messages: change the messages, or give "
            "the prompt as text",
            code="chat_template_failed",
        )

    def _counted(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a text. Call `check_length` before each piece."""
        length = 0
        for piece in pieces:
            length += len(piece)
            self.check_length(length)
            yield piece

    # Compiled at first use, so a broken template fails only the requests that need it.
    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _tool_template(self) -> Template:
        return self._environment.from_string(self._tool_source)

    @cached_property
    def _environment(self) -> Environment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


def checked_variables(variables: object) -> dict[str, Any]:
    """Check a user's variables for a chat template and return them. Raises UserError for an invalid one."""
    found: dict[str, Any] = {}
    for key, value in entries("chat_template_kwargs", {} if variables is None else variables, _MOST_VARIABLES, "names"):
        name = text("a name in chat_template_kwargs", key)
        if name in _OWN_VARIABLES:
            raise UserError(
                f"chat_template_kwargs has {name}: give it as a separate field, outside chat_template_kwargs, or leave "
                "it out"
            )
        found[name] = value
    return found


def _marked(message: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a message with the mark after its last text, and this text. The text is None if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    parts = list(content or ())
    place = next((place for place in reversed(range(len(parts))) if "text" in parts[place]), None)
    if place is None:
        return {}, None
    said = parts[place]["text"]
    parts[place] = {**parts[place], "text": said + _MARK}
    return {**message, "content": parts}, said


class _GenerationBlock(Extension):
    """Jinja extension for `{% generation %}`, which marks the assistant's text for training. It renders the body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Replaces Jinja's own filter, which escapes HTML. Models are not trained on escaped text.
def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
