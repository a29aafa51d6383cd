"""Fields that say what becomes of a model's reasoning: vLLM's and SGLang's."""

from longhelix.serve.bodies.body import Body


class Reasoned(Body):
    """What requests for the next message of a conversation have in common.

    include_reasoning: whether the answer has the reasoning; true by default.
    separate_reasoning: whether it is apart from the content, which a guide then describes alone; true by default.
    """

    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @property
    def separates(self) -> bool:
        return self.separate_reasoning is not False

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False
