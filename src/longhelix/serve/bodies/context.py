"""Of /v1/contexts."""

from longhelix.serve.bodies.body import ContextName, ModelName
from longhelix.serve.bodies.message import Messages
from longhelix.serve.bodies.prompt import Prompt
from longhelix.serve.bodies.templated import Templated


class ContextBody(Templated):
    """A context to be saved. replace: also in place of the one that has its name."""

    id: ContextName
    model: ModelName | None = None
    prompt: Prompt | None = None
    messages: Messages | None = None
    replace: bool | None = None
