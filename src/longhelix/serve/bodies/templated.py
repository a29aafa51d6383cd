"""Request fields of transformers, vLLM and SGLang that control how the chat template renders messages."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from longhelix.serve.bodies.body import Body

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplatedBody(Body):
    """Fields for the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the template reads, such as enable_thinking."""

    def rendering(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `ChatTemplate.render`.

        Args:
            defaults: template variables from the server's start options. The request overrides them.
        """
        return {"variables": {**defaults, **self._effort(), **(self.chat_template_kwargs or {})}}

    def _effort(self) -> Mapping[str, Any]:
        return {}


class PromptEndingBody(TemplatedBody):
    """Fields that control how the prompt ends."""

    add_generation_prompt: bool | None = None
    """End the prompt with the start of an assistant message; true by default."""
    continue_final_message: bool | None = None
    """Continue the last message instead of starting a new one; false by default."""

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message is set together with add_generation_prompt: set only one of them")
        return self

    def rendering(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return super().rendering(defaults) | {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """Return the template variables for this reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
