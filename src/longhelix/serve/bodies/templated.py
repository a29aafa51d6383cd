"""Fields that say how a chat template makes a prompt of messages: those of transformers, vLLM and SGLang."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from longhelix.serve.bodies.body import Body

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(Body):
    """chat_template_kwargs: variables that the template reads, such as enable_thinking."""

    chat_template_kwargs: dict[str, Any] | None = None

    def rendering(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `ChatTemplate.render`. defaults: variables that the server was started with."""
        return {"variables": {**defaults, **self._effort(), **(self.chat_template_kwargs or {})}}

    def _effort(self) -> Mapping[str, Any]:
        return {}


class Ended(Templated):
    """add_generation_prompt: whether the prompt ends where the assistant speaks next; true by default.

    continue_final_message: whether the answer goes on with the last message; false by default.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message is set together with add_generation_prompt: an answer goes on with the last "
                "message, or is one of its own"
            )
        return self

    def rendering(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return super().rendering(defaults) | {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """Return the variables by which templates are told how much to reason."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
