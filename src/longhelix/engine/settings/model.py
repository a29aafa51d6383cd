"""The model of a checkpoint, as the engine runs it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.parameters import check, with_stored_formats
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.vision_language_checkpoint import VisionLanguageCheckpoint
from longhelix.errors import UserError
from longhelix.spec import ModelSpec, read_hf_config, unread_fields
from longhelix.spec.missing_parts import missing_parts


def read_model(checkpoint: SafetensorsCheckpoint | GgufCheckpoint, rope_scaling: Mapping[str, Any] | None) -> ModelSpec:
    """Return the spec of a checkpoint's model, with the formats in which the checkpoint stores its weights.

    Args:
        checkpoint: the checkpoint. Its tensors are compared with those that the model needs.
        rope_scaling: replaces the RoPE settings of the model. None if it does not.

    Raises:
        UserError: the engine cannot run the model, or tensors are missing or have other shapes.
    """
    tensors = {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()}
    if isinstance(checkpoint, GgufCheckpoint):
        spec = checkpoint.spec(rope_scaling)
        _check_runs(spec)
    else:
        spec = read_hf_config(checkpoint.config, checkpoint.generation_config, rope_scaling=rope_scaling)
        _check_runs(spec)
        spec = _with_own_head(spec, checkpoint)
        _warn_of_unread(checkpoint.config)
    spec = with_stored_formats(spec, checkpoint.tensors)
    check(spec, tensors, gguf=isinstance(checkpoint, GgufCheckpoint))
    return spec


def _with_own_head(spec: ModelSpec, checkpoint: SafetensorsCheckpoint | VisionLanguageCheckpoint) -> ModelSpec:
    """Use the checkpoint's own head if it differs from the embedding, even if the config ties head and embedding.

    transformers does the same.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not spec.vocabulary.tied_embeddings or embedding not in checkpoint.tensors:
        return spec
    if head not in checkpoint.tensors:
        quantisation = spec.checkpoint.quantisation
        packed = () if quantisation is None or quantisation.storage_of("lm_head") is None else checkpoint.tensors
        head = min((name for name in packed if name.startswith("lm_head.")), default="")
    if not head or checkpoint.holds_same(embedding, head):
        return spec
    warnings.warn(
        f"the model's config ties its head to its embedding, but the checkpoint has a different {head}, which the "
        "engine uses: set tie_word_embeddings to false in config.json, or remove the tensor",
        stacklevel=5,
    )
    return replace(spec, vocabulary=replace(spec.vocabulary, tied_embeddings=False))


def _check_runs(spec: ModelSpec) -> None:
    missing = missing_parts(spec)
    if missing:
        raise UserError(
            f"longhelix cannot run this {spec.architecture} model, because these parts are not implemented: "
            f"{', '.join(missing)}. `longhelix plan` can plan for it",
            "unsupported_model",
        )
    if any(moe.shared_bias for moe in spec.moes):
        raise UserError("mlp_bias with experts is not supported: set mlp_bias to false in the model's config")


def _warn_of_unread(config: Mapping[str, Any]) -> None:
    unread = unread_fields(config)
    if unread:
        warnings.warn(
            f"config.json has fields that neither longhelix nor transformers reads: {', '.join(unread)}. If the "
            "model's own code reads them, answers may differ from its answers",
            stacklevel=4,
        )
