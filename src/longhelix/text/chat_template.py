"""The model's own chat template: messages in, prompt text out."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longhelix.errors import UserError
from longhelix.text.tool_calls import ToolForm, form_of

# What messages may go on after: templates want users and assistants to take turns, and some have no system prompt.
_USER, _ASSISTANT = {"role": "user", "content": "."}, {"role": "assistant", "content": "."}
_EARLIER = ([_USER, _ASSISTANT], [_USER], [{"role": "system", "content": "."}])


class ChatTemplate:
    """A Jinja template from a checkpoint, rendered in a sandbox: it is foreign code.

    `special_tokens` are the variables it may name, such as `bos_token` and `eos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model calls functions; None if the template does not take any, or shows a form that is not known."""
        try:
            names = meta.find_undeclared_variables(self._environment.parse(self._source))
        except TemplateError:  # whoever renders it is told
            return None
        return form_of(self._source) if "tools" in names else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_answered: bool = True,
    ) -> str:
        """The prompt up to where the assistant speaks, or without `is_answered`, to the end of the last message.
        UserError where the template refuses the messages. tools: the functions that it may call, as OpenAI has them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=is_answered,
                # Templates compare these with none, and an undefined name is not none.
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template can raise whatever an expression can
            raise UserError(
                f"the model's chat template failed on these messages ({error}); "
                "change the messages, or use generate without --chat",
                code="chat_template_failed",
            ) from error

    def render_more(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What `render` has of messages that come behind others: without what begins a conversation, such as a BOS and
        a system prompt that nobody gave. UserError where the template has them only as a beginning."""
        for before in _EARLIER:
            try:
                begun, whole = self.render(before, is_answered=False), self.render([*before, *messages])
            except UserError:  # not behind such messages
                continue
            if whole.startswith(begun):
                return whole[len(begun) :]
        raise UserError(
            "the model's chat template does not say how these messages go on after others; change the messages, or "
            "give a prompt as text",
            code="chat_template_failed",
        )

    # Compiled at first use, so that a broken template stops only the requests that need it.
    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self._source)

    @cached_property
    def _environment(self) -> Environment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; for inference it is only its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Jinja's own filter escapes HTML, and models were not trained on that.
def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
