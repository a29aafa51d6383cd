"""Computes FLOPs and bytes from shapes, independently of the code that is measured."""

from collections.abc import Iterable

from longhelix.compute.runner.config import EngineConfig
from longhelix.perf.flops import attention_flops as model_attention_flops
from longhelix.spec import FORMATS, LayerSpec, ModelSpec
from longhelix.spec.weights import Split, layer_weights

_FLOAT_BYTES = 4  # size of an LSE or a scale
_SCALED_NUMBERS = 64  # number of 1-byte values in a row that share one scale


def attention_flops(num_query_heads: int, key_size: int, value_size: int, num_pairs: int) -> int:
    """FLOPs of attention: 2 (key size + value size) per query head and per pair of a query row and a visible key."""
    return 2 * num_query_heads * (key_size + value_size) * num_pairs


def causal_pairs(num_rows: int, context: int) -> int:
    """Number of row-key pairs under the causal mask, for the last T = `num_rows` of S tokens: S - T + 1 + ... + S."""
    return num_rows * (2 * context - num_rows + 1) // 2


def prefill_flops(spec: ModelSpec, prompt: int) -> int:
    """FLOPs of a prefill: 2 per layer weight and token, plus causal attention and one row of the output head.

    Of the experts of a layer, those that a token takes count.
    """
    attended = model_attention_flops(spec, prompt, prompt, causal=True)
    weights = sum(_products_of_token(spec, layer) for layer in spec.layers)
    return int(2 * prompt * weights + attended) + 2 * spec.hidden_size * spec.vocabulary.size


def _products_of_token(spec: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of a layer's matrices that a token passes through."""
    taken = 0 if layer.moe is None else layer.moe.experts_per_token
    return sum(
        weight.num_elements * (taken if weight.experts.split is Split.EXPERTS else 1)
        for weight in layer_weights(spec, layer)
        if weight.columns is not None
    )


def linear_flops(num_rows: int, outputs: int, depth: int) -> int:
    """FLOPs of a matrix product: 2 per row and weight."""
    return 2 * num_rows * outputs * depth


def prefill_sent_bytes(config: EngineConfig, chunks: Iterable[int]) -> int | None:
    """Bytes that all ranks together send to prefill a prompt, without headers and without sampling.

    Args:
        config: engine configuration.
        chunks: number of rows of each step of the prompt.

    Returns:
        The number of bytes. None for models with MLA or experts, because their ranks also send other tensors.
    """
    if config.spec.has_latents or config.spec.moes:
        return None
    shards = config.execution.token_ranges.shards
    return sum(
        (_token_shards_bytes if shards(rows, decodes=rows == 1) else _whole_rows_bytes)(config, rows) for rows in chunks
    )


def _whole_rows_bytes(config: EngineConfig, rows: int) -> int:
    """Bytes of a step with whole rows on each rank. The embedding and both blocks of a layer need an all-reduce."""
    sums = 1 + 2 * config.spec.num_layers
    return sums * all_reduce_bytes(rows * _row_bytes(config), config.layout.ffn_ranks) + _exchange_bytes(config, rows)


def _token_shards_bytes(config: EngineConfig, rows: int) -> int:
    """Bytes of a step in which each rank has a shard of the tokens.

    As in a step with whole rows, the ranks all-reduce the embedding. Each block ends in a reduce-scatter. The ranks
    all-gather the input of a block after its norm. They send int8 values with scales if the matrix products use int8.
    After the last layer, the ranks all-gather the hidden states. FlashComm shards the tokens of the first norm, but the
    compiler pass does not.
    """
    spec, ranks = config.spec, config.layout.ffn_ranks
    blocks = 2 * spec.num_layers
    padded_rows = -(-rows // ranks) * ranks
    hidden_bytes = padded_rows * _row_bytes(config)
    scales_bytes = -(-spec.hidden_size // _SCALED_NUMBERS) * _FLOAT_BYTES
    in_bytes = config.formats.activation_dtype == "int8"
    normed_row_bytes = spec.hidden_size + scales_bytes if in_bytes else _row_bytes(config)
    gathered = blocks if config.execution.token_ranges.flash_comm else blocks - 1
    return (
        all_reduce_bytes(rows * _row_bytes(config), ranks)
        + blocks * reduce_scatter_bytes(hidden_bytes, ranks)
        + gathered * reduce_scatter_bytes(padded_rows * normed_row_bytes, ranks)
        + reduce_scatter_bytes(hidden_bytes, ranks)
        + _exchange_bytes(config, rows)
    )


def _exchange_bytes(config: EngineConfig, rows: int) -> int:
    """Bytes of Helix's exchange. For each row and query head, KVP - 1 ranks each send one output and its LSE."""
    attentions = (layer.attention for layer in config.spec.layers if layer.attention is not None)
    row_bytes = sum(
        attention.heads.num_query_heads * (attention.output_size * _number_bytes(config) + _FLOAT_BYTES)
        for attention in attentions
    )
    return (config.layout.kvp - 1) * rows * row_bytes


def _row_bytes(config: EngineConfig) -> int:
    return config.spec.hidden_size * _number_bytes(config)


def _number_bytes(config: EngineConfig) -> int:
    return FORMATS[config.formats.dtype].bits // 8


def all_reduce_bytes(tensor_bytes: int, ranks: int) -> int:
    """Bytes that all n ranks together send in a ring all-reduce. Each rank sends 2 (n - 1) / n of the tensor."""
    return 2 * (ranks - 1) * tensor_bytes


def reduce_scatter_bytes(tensor_bytes: int, ranks: int) -> int:
    """Bytes that all n ranks together send in a reduce-scatter or an all-gather.

    Each rank sends (n - 1) / n of the tensor.

    Args:
        tensor_bytes: size of the whole tensor, before a reduce-scatter or after an all-gather.
        ranks: number of ranks n.
    """
    return (ranks - 1) * tensor_bytes
