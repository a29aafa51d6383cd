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

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt up to where the assistant speaks; UserError where the template refuses the messages. tools: the
        functions that it may call, as OpenAI has them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
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
