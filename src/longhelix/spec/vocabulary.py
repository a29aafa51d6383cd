"""The tokens of a model: their number, and how they become hidden states and logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Multipliers:
    """Numbers that a model is scaled by before its first layer and after its last one.

    Attributes:
        embedding: The embeddings of tokens are scaled by it.
        rounded: `embedding` is first rounded to the dtype of activations.
        logits: Logits are scaled by it.
        logit_cap: Scaled logits l become logit_cap * tanh(l / logit_cap). None: they stay as they are.
    """

    embedding: float = 1.0
    rounded: bool = False
    logits: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        size: Number of tokens.
        eos_token_ids: Tokens that end a sequence. The engine adds those of the tokenizer.
        tied_embeddings: The head has the embedding's weights.
        multipliers: What embeddings and logits are scaled by.
    """

    size: int
    eos_token_ids: tuple[int, ...] = ()
    tied_embeddings: bool = False
    multipliers: Multipliers = Multipliers()
