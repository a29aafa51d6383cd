"""Useful work of a model, by formula: what utilisation is measured against."""

from longhelix.spec import ModelSpec


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token is multiplied with: all but the embedding, and of the experts those it takes."""
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.moe is None:
        return model.num_parameters - embedding
    idle = model.moe.num_experts - model.moe.experts_per_token
    sparse_layers = model.num_layers - model.moe.num_dense_layers
    return model.num_parameters - embedding - sparse_layers * idle * 3 * model.hidden_size * model.moe.expert_size


def attention_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """Scores and sums of `rows` last rows of `context` tokens; not causal: as if every row saw all of them.

    n rows of n: 4 n^2 d h_q L, the convention of arXiv 2409.17264. MLA by its direct form.
    """
    channels = 2 * model.head_size if model.mla is None else model.head_size + model.mla.value_size
    pairs = rows * (context - (rows - 1) / 2) if causal else rows * context
    return 2.0 * model.num_layers * model.num_query_heads * channels * pairs


def model_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """2 P n + attention."""
    return 2.0 * active_parameters(model) * rows + attention_flops(model, rows, context, causal=causal)
