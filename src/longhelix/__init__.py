"""Exact LLM inference with contexts of millions of tokens: plan a parallel layout, run it, serve it."""

from typing import TYPE_CHECKING, Any

from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import SamplingParams, ServiceLevel
from longhelix.spec.layout import Layout

if TYPE_CHECKING:
    from longhelix.engine.llm import LLM
    from longhelix.engine.prompt import ImagePrompt

__all__ = ["LLM", "EngineError", "Guide", "ImagePrompt", "Layout", "SamplingParams", "ServiceLevel", "UserError"]


def __getattr__(name: str) -> Any:
    # Planning and estimating need no engine, so its sockets and tokenizers load with the first LLM.
    if name == "LLM":
        from longhelix.engine.llm import LLM

        return LLM
    if name == "ImagePrompt":
        from longhelix.engine.prompt import ImagePrompt

        return ImagePrompt
    raise AttributeError(f"module 'longhelix' has no attribute {name!r}")
