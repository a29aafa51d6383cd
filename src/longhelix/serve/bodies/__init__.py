"""What clients send: OpenAI's fields, vLLM's, and our own, each with its bounds. Fields that nobody knows pass; those
that others serve, and that change an answer, are refused unless they ask for what is done anyway."""

from longhelix.serve.bodies.chat import ChatBody, Function
from longhelix.serve.bodies.completion import CompletionBody
from longhelix.serve.bodies.context import ContextBody
from longhelix.serve.bodies.message import Message
from longhelix.serve.bodies.response import ResponseBody
from longhelix.serve.bodies.sampled import Sampled, ScoredBody
from longhelix.serve.bodies.templated import Ended
from longhelix.serve.bodies.tokens import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "CompletionBody",
    "ContextBody",
    "DetokenizeBody",
    "Ended",
    "Function",
    "Message",
    "ResponseBody",
    "Sampled",
    "ScoredBody",
    "TokenizeBody",
]
