"""Request bodies. They have OpenAI's fields, vLLM's fields and this project's own fields, all with limits.

Unknown fields are ignored. The server refuses unsupported fields of other servers that would change the answer, unless
their value matches what this server does anyway.
"""

from longhelix.serve.bodies.chat import ChatBody, Function
from longhelix.serve.bodies.completion import CompletionBody
from longhelix.serve.bodies.context import ContextBody
from longhelix.serve.bodies.message import Message
from longhelix.serve.bodies.response import ResponseBody
from longhelix.serve.bodies.sampled import SampledBody, ScoredBody
from longhelix.serve.bodies.templated import PromptEndingBody
from longhelix.serve.bodies.tokens import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "CompletionBody",
    "ContextBody",
    "DetokenizeBody",
    "Function",
    "Message",
    "PromptEndingBody",
    "ResponseBody",
    "SampledBody",
    "ScoredBody",
    "TokenizeBody",
]
