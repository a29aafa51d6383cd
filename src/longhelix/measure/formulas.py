"""How much work there is, counted from shapes alone and not from the code that does it."""

from collections.abc import Iterable

from longhelix.compute.runner.config import EngineConfig
from longhelix.spec import FORMATS, ModelSpec

_FLOAT_BYTES = 4  # of an LSE, and of a scale
_SCALED_NUMBERS = 64  # bytes of a row that share a scale


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


def prefill_sent_bytes(config: EngineConfig, chunks: Iterable[int]) -> int | None:
    """What all ranks together send for the hidden states of a prompt that runs in steps of so many rows each, headers
    and the choice of a token aside. None for models with latents or experts, of which other things travel."""
    if config.spec.mla is not None or config.spec.moe is not None:
        return None
    shards = config.token_ranges.shards
    return sum(
        (_token_shards_bytes if shards(rows, decodes=rows == 1) else _whole_rows_bytes)(config, rows) for rows in chunks
    )


def _whole_rows_bytes(config: EngineConfig, rows: int) -> int:
    """The embedding and two blocks of each layer, each summed by an all-reduce."""
    sums = 1 + 2 * config.spec.num_layers
    return sums * all_reduce_bytes(rows * _row_bytes(config), config.layout.ffn_ranks) + _exchange_bytes(config, rows)


def _token_shards_bytes(config: EngineConfig, rows: int) -> int:
    """The embedding as before; each block ends in a reduce-scatter. What it begins with is gathered after the norm, as
    bytes with their scales where products take these; at the end hidden states are. A compiler pass leaves the first
    norm whole, the layers by themselves do not."""
    spec, ranks = config.spec, config.layout.ffn_ranks
    blocks = 2 * spec.num_layers
    padded_rows = -(-rows // ranks) * ranks
    hidden_bytes = padded_rows * _row_bytes(config)
    scales_bytes = -(-spec.hidden_size // _SCALED_NUMBERS) * _FLOAT_BYTES
    normed_row_bytes = spec.hidden_size + scales_bytes if config.activation_dtype else _row_bytes(config)
    gathered = blocks if config.token_ranges.flash_comm else blocks - 1
    return (
        all_reduce_bytes(rows * _row_bytes(config), ranks)
        + blocks * reduce_scatter_bytes(hidden_bytes, ranks)
        + gathered * reduce_scatter_bytes(padded_rows * normed_row_bytes, ranks)
        + reduce_scatter_bytes(hidden_bytes, ranks)
        + _exchange_bytes(config, rows)
    )


def _exchange_bytes(config: EngineConfig, rows: int) -> int:
    """Helix: of each row and query head, KVP - 1 ranks send an output and its LSE to the one that merges them."""
    spec = config.spec
    state_bytes = spec.head_size * _number_bytes(config) + _FLOAT_BYTES
    return spec.num_layers * (config.layout.kvp - 1) * rows * spec.num_query_heads * state_bytes


def _row_bytes(config: EngineConfig) -> int:
    return config.spec.hidden_size * _number_bytes(config)


def _number_bytes(config: EngineConfig) -> int:
    return FORMATS[config.dtype].bits // 8


def all_reduce_bytes(tensor_bytes: int, ranks: int) -> int:
    """What all ranks send together in an all-reduce: by a ring each sends 2 (n - 1) / n of the tensor."""
    return 2 * (ranks - 1) * tensor_bytes


def reduce_scatter_bytes(tensor_bytes: int, ranks: int) -> int:
    """What all ranks send together in a reduce-scatter, or in an all-gather, of a tensor that is whole before or after
    it: each sends (n - 1) / n."""
    return (ranks - 1) * tensor_bytes
