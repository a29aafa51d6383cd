"""Warn about contexts that are longer than a model supports."""

from longhelix.spec import ModelSpec
from longhelix.units import count


def beyond_positions(model: ModelSpec, context: int) -> str | None:
    """Return a warning if the context has more tokens than the model has positions; otherwise None.

    The predicted costs of such a context are valid, but answers may be meaningless beyond these positions.
    """
    if context <= model.scaled_positions:
        return None
    return (
        f"a context of {count(context)} tokens exceeds the {count(model.scaled_positions)} positions that the model "
        "supports: the predicted costs are valid, but answers may be meaningless beyond these positions"
    )
