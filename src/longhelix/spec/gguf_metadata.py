"""Reads the metadata of GGUF files, by translating it into the settings of a config.json."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import positive, replaced
from longhelix.spec.families import FAMILIES
from longhelix.spec.family import Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, check_neutral
from longhelix.spec.hf_config import read_hf_config
from longhelix.spec.model import ModelSpec
from longhelix.values import shown

# Settings of rope.scaling, by their names in config.json.
_SCALING = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Factors that change nothing if they are one.
_FACTORS = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")


def gguf_architectures() -> tuple[str, ...]:
    """Return the architectures of GGUF files that longhelix reads."""
    return tuple(sorted({form.architecture for _, form, _ in _forms()}))


def gguf_family(metadata: GgufMetadata) -> tuple[str, GgufForm, Family]:
    """Return the model_type that a GGUF file's config.json would have, and the family.

    Raises:
        UserError: no family reads files of this architecture.
    """
    for model_type, form, family in _forms():
        if form.architecture == metadata.architecture and form.matches(metadata):
            return model_type, form, family
    given = shown(metadata.values.get("general.architecture"))
    known = ", ".join(gguf_architectures())
    raise UserError(
        f"the GGUF file is of architecture {given}: longhelix reads GGUF files of {known}", "unknown_architecture"
    )


def read_gguf(
    metadata: Mapping[str, Any],
    rope_divisors: Sequence[float] = (),
    *,
    tensors: Collection[str] = (),
    rope_scaling: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Read the metadata of a GGUF file.

    Args:
        metadata: values by key.
        rope_divisors: the rope_freqs tensor, if the file has one.
        tensors: names of the file's tensors, as in a Hugging Face checkpoint.
        rope_scaling: settings that replace the file's own rope settings, all but theta.

    Raises:
        UserError: a key is missing, or longhelix does not know what a value means.
    """
    found = GgufMetadata(metadata, tensors)
    model_type, form, _ = gguf_family(found)
    check_neutral(found, form)
    rope, divisors = _rope_settings(found, form, rope_divisors), rope_divisors
    if rope_scaling is not None:
        rope, divisors = replaced(rope, rope_scaling), ()
    settings = {"model_type": model_type, **common_settings(found), **form.settings(found), "rope_parameters": rope}
    return read_hf_config(settings, rope_divisors=divisors)


def common_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Read the settings that are the same for all families."""
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    num_predicting = metadata.count("nextn_predict_layers", 0, least=0)  # the last layers
    return {
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.count("block_count") - num_predicting,
        "num_attention_heads": metadata.count("attention.head_count"),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": metadata.count("vocab_size", len(tokens) if isinstance(tokens, (list, tuple)) else None),
        "eos_token_id": metadata.values.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": "lm_head.weight" not in metadata.tensors,
        "dtype": "bfloat16",
    }


def _forms() -> list[tuple[str, GgufForm, Family]]:
    return [(name, family.gguf, family) for name, family in FAMILIES.items() if family.gguf is not None]


def _rope_settings(metadata: GgufMetadata, form: GgufForm, divisors: Sequence[float]) -> dict[str, Any]:
    """Return the rope settings of a GGUF file, with Hugging Face's names."""
    rope = {"rope_theta": metadata.get("rope.freq_base") if metadata.has("rope.freq_base") else 10_000.0}
    prefix = metadata.key("rope.scaling.")
    scaling = {
        key.removeprefix(prefix): setting
        for key, setting in metadata.values.items()
        if key.startswith(prefix) and key != f"{prefix}finetuned"
    }
    if metadata.has("rope.scale_linear"):  # the name of old files
        scaling.setdefault("factor", metadata.get("rope.scale_linear"))
    multiplier = scaling.pop("yarn_log_multiplier", None) if form.log_multiplier is not None else None
    kind = scaling.pop("type", "linear" if "factor" in scaling else "none")
    if not isinstance(kind, str) or kind != "none":
        rope |= {"rope_type": kind, "factor": scaling.pop("factor", 1.0)}
        rope |= {_SCALING[key]: scaling.pop(key) for key in _SCALING if key in scaling}
        scaling = {key: value for key, value in scaling.items() if key not in _FACTORS or not _is_one(value)}
        if multiplier is not None and form.log_multiplier is not None:
            key = f"{prefix}yarn_log_multiplier"
            rope |= form.log_multiplier(positive({key: multiplier}, key))
        scaling |= {"rope_freqs": divisors} if divisors else {}
    if scaling:
        raise UserError(
            f"the GGUF file combines rope scaling {shown(kind)} with {shown(next(iter(scaling)))}, which longhelix "
            "does not know: use the model's Hugging Face folder",
            "unknown_rope",
        )
    return rope


def _is_one(value: object) -> bool:
    return isinstance(value, float) and value == 1.0
