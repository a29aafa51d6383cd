"""vLLM's and SGLang's request fields that control how reasoning is returned."""

from longhelix.serve.bodies.body import Body


class ReasonedBody(Body):
    """Fields that control how reasoning is returned."""

    include_reasoning: bool | None = None
    """Return the reasoning; true by default."""
    separate_reasoning: bool | None = None
    """Return the reasoning separately from the content, and apply a guide to the content only; true by default."""

    @property
    def separates(self) -> bool:
        return self.separate_reasoning is not False

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False
