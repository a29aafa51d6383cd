"""Reads the metadata of GGUF files of the llama architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.attention import GroupedQueryAttention, Visibility
from longhelix.spec.config import MOST_LAYERS, count, count_or_none, positive, replaced, token_ids
from longhelix.spec.ffn import MLP
from longhelix.spec.layer import LayerSpec
from longhelix.spec.layout import HeadShape
from longhelix.spec.model import CheckpointFormat, ModelSpec
from longhelix.spec.rope import RopeSpec, frequency_divisors
from longhelix.spec.vocabulary import Vocabulary
from longhelix.values import shown


def read_gguf(
    metadata: Mapping[str, Any],
    rope_divisors: Sequence[float] = (),
    *,
    tied: bool,
    rope_scaling: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Read the metadata of a GGUF file of the llama architecture.

    Args:
        metadata: values by key.
        rope_divisors: the rope_freqs tensor, if the file has one.
        tied: the file has no output tensor of its own.
        rope_scaling: settings that replace the file's own rope settings, all but theta.

    Raises:
        UserError: a key is missing, or longhelix does not know what a value means.
    """
    hidden_size, num_query_heads = _number(metadata, "embedding_length"), _number(metadata, "attention.head_count")
    head_size = _number(metadata, "attention.key_length", hidden_size // num_query_heads)
    max_positions = _number(metadata, "context_length")
    rope = _rope_settings(metadata, rope_divisors, rope_scaling)
    if _number(metadata, "rope.dimension_count", head_size) != head_size:
        raise UserError(
            "the GGUF file rotates only a part of each head, which longhelix does not support for GGUF files: use the "
            "model's safetensors files"
        )
    resolved = RopeSpec.from_config(rope, head_size, max_positions)
    if rope_divisors and rope_scaling is None:
        divisors = frequency_divisors({"rope_freqs": list(rope_divisors)}, "rope_freqs", head_size)
        resolved = replace(resolved, divisors=divisors)
    causal = metadata.get("llama.attention.causal", True)
    if causal is not True:
        raise UserError(
            f"llama.attention.causal in the GGUF file is {shown(causal)}: longhelix runs only models that attend "
            "to earlier tokens, so choose such a model",
            "unsupported_model",
        )
    attention = GroupedQueryAttention(
        heads=HeadShape(num_query_heads, _number(metadata, "attention.head_count_kv", num_query_heads)),
        head_size=head_size,
        rotated_size=head_size,
        rope=resolved,
        visibility=Visibility(window_tokens=count_or_none(metadata, "llama.attention.sliding_window")),
    )
    layer = LayerSpec((attention,), (MLP(_number(metadata, "feed_forward_length")),))
    tokens = metadata.get("tokenizer.ggml.tokens")
    return ModelSpec(
        architecture="llama",
        hidden_size=hidden_size,
        max_positions=max_positions,
        rms_norm_eps=positive(metadata, _present(metadata, "llama.attention.layer_norm_rms_epsilon"), 1e-5),
        layers=(layer,) * count(metadata, _present(metadata, "llama.block_count"), most=MOST_LAYERS),
        vocabulary=Vocabulary(
            size=_number(metadata, "vocab_size", len(tokens) if isinstance(tokens, (list, tuple)) else None),
            eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
            tied_embeddings=tied,
        ),
        checkpoint=CheckpointFormat("bfloat16"),
    )


def _present(metadata: Mapping[str, Any], key: str) -> str:
    if metadata.get(key) is None:
        raise UserError(f"the GGUF file has no metadata key {key!r}", "invalid_model")
    return key


def _number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    name = f"llama.{key}"
    return count(metadata, _present(metadata, name) if default is None else name, default)


def _rope_settings(
    metadata: Mapping[str, Any], divisors: Sequence[float], rope_scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The rope settings of a GGUF file, with Hugging Face's names."""
    theta = metadata.get("llama.rope.freq_base")
    rope: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if rope_scaling is not None:
        return replaced(rope, rope_scaling)
    scaling = {
        key.removeprefix("llama.rope.scaling."): setting
        for key, setting in metadata.items()
        if key.startswith("llama.rope.scaling.") and key != "llama.rope.scaling.finetuned"
    }
    if metadata.get("llama.rope.scale_linear") is not None:  # the name of old files
        scaling.setdefault("factor", metadata["llama.rope.scale_linear"])
    kind = scaling.pop("type", "linear" if "factor" in scaling else "none")
    if not isinstance(kind, str) or kind != "none":
        rope |= {"rope_type": kind, "factor": scaling.pop("factor", 1.0)}
        if "original_context_length" in scaling:
            rope["original_max_position_embeddings"] = scaling.pop("original_context_length")
        scaling |= {"rope_freqs": divisors} if divisors else {}
    if scaling:
        raise UserError(
            f"the GGUF file combines rope scaling {shown(kind)} with {shown(next(iter(scaling)))}, which longhelix "
            "does not know: use the model's Hugging Face folder",
            "unknown_rope",
        )
    return rope
