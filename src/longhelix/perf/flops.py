"""Useful work of a model, by formula: what utilisation is measured against."""

from collections import Counter

from longhelix.spec import LinearAttention, ModelSpec
from longhelix.spec.layer import Mixer
from longhelix.spec.weights import num_active_parameters


def attention_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """Scores and sums of `rows` last rows of `context` tokens; not causal: as if every row saw all of them.

    n rows of n: 4 n^2 d h_q L, the convention of arXiv 2409.17264. MLA by its direct form. A layer with a window, or
    with an indexer, whose scores count as well: no more than that for each row. Linear attention: row by row.
    """
    pairs = rows * (context - (rows - 1) / 2) if causal else rows * context
    counts = Counter(mixer for layer in model.layers for mixer in layer.mixers)
    return sum(count * _mixer_flops(mixer, rows, pairs) for mixer, count in counts.items())


def _mixer_flops(mixer: Mixer, rows: float, pairs: float) -> float:
    """Of one layer. pairs: of rows with the tokens before them, and themselves."""
    if isinstance(mixer, LinearAttention):
        return mixer.num_value_heads * mixer.row_flops * rows
    pair_flops = 2.0 * mixer.heads.num_query_heads * (mixer.head_size + mixer.output_size)
    indexer, visibility = mixer.visibility.indexer, mixer.visibility
    if indexer is not None:
        return pair_flops * min(pairs, rows * indexer.chosen_tokens) + indexer.pair_flops * pairs
    seen = pairs if visibility.limit_tokens is None else min(pairs, rows * visibility.mean_tokens)
    return pair_flops * seen


def model_flops(model: ModelSpec, rows: float, context: float, *, causal: bool = False) -> float:
    """2 P n + attention."""
    return 2.0 * num_active_parameters(model) * rows + attention_flops(model, rows, context, causal=causal)
