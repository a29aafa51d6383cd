"""Request body of /v1/contexts."""

from longhelix.serve.bodies.body import ContextName, ModelName
from longhelix.serve.bodies.message import Messages
from longhelix.serve.bodies.prompt import Prompt
from longhelix.serve.bodies.templated import TemplatedBody


class ContextBody(TemplatedBody):
    """Context to save. Set either `prompt` or `messages`."""

    id: ContextName
    """Name of the context."""
    model: ModelName | None = None
    prompt: Prompt | None = None
    """Text or token ids of the context."""
    messages: Messages | None = None
    """Messages at the beginning of a conversation."""
    replace: bool | None = None
    """Replace an existing context of the same name."""
