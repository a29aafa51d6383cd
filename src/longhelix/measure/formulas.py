"""How much work there is, counted from shapes alone and not from the code that does it."""

from longhelix.spec import ModelSpec


def attention_flops(num_query_heads: int, key_size: int, value_size: int, num_pairs: int) -> int:
    """2 (C_key + C_value) for every query head and pair of a query row with a key that it sees."""
    return 2 * num_query_heads * (key_size + value_size) * num_pairs


def causal_pairs(num_rows: int, context: int) -> int:
    """Pairs of the last `num_rows` rows of `context` tokens with the keys up to their own: a sum of S - T + 1 ... S."""
    return num_rows * (2 * context - num_rows + 1) // 2


def prefill_flops(spec: ModelSpec, prompt: int) -> int:
    """A prompt's FLOPs: 2 for every weight of a layer's products and token, causal attention, one row of the head."""
    queries, keys = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    layer_weights = spec.hidden_size * (2 * queries + 2 * keys + 3 * spec.ffn_size)
    attention = attention_flops(spec.num_query_heads, spec.head_size, spec.head_size, causal_pairs(prompt, prompt))
    return spec.num_layers * (2 * prompt * layer_weights + attention) + 2 * spec.hidden_size * spec.vocab_size


def linear_flops(num_rows: int, outputs: int, depth: int) -> int:
    """2 for every row and weight of a product."""
    return 2 * num_rows * outputs * depth
