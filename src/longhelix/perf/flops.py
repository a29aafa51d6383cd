"""Useful work of a model, by formula: what utilisation is measured against."""

from longhelix.spec import ModelSpec
from longhelix.spec.weights import num_active_parameters


def attention_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """Scores and sums of `rows` last rows of `context` tokens; not causal: as if every row saw all of them.

    n rows of n: 4 n^2 d h_q L, the convention of arXiv 2409.17264. MLA by its direct form. A layer with a window: no
    more than that for each row.
    """
    channels = 2 * model.head_size if model.mla is None else model.head_size + model.mla.value_size
    pairs = rows * (context - (rows - 1) / 2) if causal else rows * context
    all_flops = 2.0 * model.num_layers * model.num_query_heads * channels * pairs
    if not model.num_windowed_layers:
        return all_flops
    masked_pairs = model.num_windowed_layers * max(pairs - rows * model.mean_window, 0.0)
    return all_flops - 2.0 * model.num_query_heads * channels * masked_pairs


def model_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """2 P n + attention."""
    return 2.0 * num_active_parameters(model) * rows + attention_flops(model, rows, context, causal=causal)
