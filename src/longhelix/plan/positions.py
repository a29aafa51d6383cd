"""Warn about contexts that are longer than a model supports."""

from longhelix.spec import ModelSpec


def beyond_positions(model: ModelSpec, context: int) -> str | None:
    """Return a warning if the context has more tokens than the model has positions; otherwise None.

    Beyond these positions, the costs are the same, but answers may be meaningless.
    """
    if context <= model.scaled_positions:
        return None
    return (
        f"a context of {context} tokens exceeds the {model.scaled_positions} positions that the model supports, so "
        "answers may be meaningless beyond them; the predicted costs are still valid"
    )
