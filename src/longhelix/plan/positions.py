"""Contexts that are longer than what a model was made for."""

from longhelix.spec import ModelSpec


def beyond_positions(model: ModelSpec, context: int) -> str | None:
    """A sentence for whoever plans with a context of more tokens than the model has positions; None where it has them.

    Nothing of the costs changes there, but answers may lose their sense.
    """
    if context <= model.scaled_positions:
        return None
    return (
        f"a context of {context} tokens goes beyond the {model.scaled_positions} positions that the model was made "
        "for: the costs are valid, but answers may be meaningless beyond that"
    )
