"""Request body of /v1/contexts."""

from longhelix.serve.bodies.body import ContextName, ModelName
from longhelix.serve.bodies.message import Messages
from longhelix.serve.bodies.prompt import Prompt
from longhelix.serve.bodies.templated import TemplatedBody


class ContextBody(TemplatedBody):
    """Context to save: either `prompt` or `messages`."""

    id: ContextName
    """Name of the context."""
    model: ModelName | None = None
    prompt: Prompt | None = None
    """Text or token ids."""
    messages: Messages | None = None
    """Beginning of a conversation."""
    replace: bool | None = None
    """Replace a context of the same name."""
