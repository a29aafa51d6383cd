"""Useful work of a model, by formula: what utilisation is measured against."""

from longhelix.spec import ModelSpec
from longhelix.spec.weights import num_active_parameters


def attention_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """Scores and sums of `rows` last rows of `context` tokens; not causal: as if every row saw all of them.

    n rows of n: 4 n^2 d h_q L, the convention of arXiv 2409.17264. MLA by its direct form. A layer with a window, or
    with an indexer, whose scores count as well: no more than that for each row. Linear attention: row by row.
    """
    channels = 2 * model.head_size if model.mla is None else model.head_size + model.mla.value_size
    pairs = rows * (context - (rows - 1) / 2) if causal else rows * context
    pair_flops = 2.0 * model.num_query_heads * channels
    if model.indexer is not None:
        attended = min(pairs, rows * model.indexer.chosen_tokens)
        return model.num_layers * (pair_flops * attended + model.indexer.pair_flops * pairs)
    if model.linear is not None:
        row_flops = model.linear.num_value_heads * model.linear.row_flops
        num_linear = model.num_linear_layers
        return (model.num_layers - num_linear) * pair_flops * pairs + num_linear * row_flops * rows
    all_flops = model.num_layers * pair_flops * pairs
    if not model.num_windowed_layers:
        return all_flops
    masked_pairs = model.num_windowed_layers * max(pairs - rows * model.mean_window, 0.0)
    return all_flops - pair_flops * masked_pairs


def model_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """2 P n + attention."""
    return 2.0 * num_active_parameters(model) * rows + attention_flops(model, rows, context, causal=causal)
