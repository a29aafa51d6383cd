"""Reads config.json of Hugging Face folders. longhelix refuses whatever it would have to guess."""

from collections.abc import Mapping, Sequence
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import count, dtype_name, positive, replaced, rope_mapping, switch, token_ids
from longhelix.spec.config_fields import completed
from longhelix.spec.families import FAMILIES
from longhelix.spec.model import CheckpointFormat, ModelSpec
from longhelix.spec.quantisation import read_quantisation
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vocabulary import Vocabulary
from longhelix.values import shown


def read_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_divisors: Sequence[float] = (),
) -> ModelSpec:
    """Read config.json.

    Args:
        config: its content.
        generation_config: content of generation_config.json. Its end-of-sequence ids replace those of config.json.
        rope_scaling: settings that replace the config's own rope settings, all but theta.
        rope_divisors: divide the frequencies one by one, if there are any. GGUF files have them as a tensor.

    Raises:
        UserError: the architecture is unknown, or longhelix does not know what a value means.
    """
    architecture = config.get("model_type")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise UserError(
            f"the model's architecture is {shown(architecture)}: longhelix knows {', '.join(FAMILIES)}",
            "unknown_architecture",
        )
    vision = None if family.vision is None else family.vision(config)
    config = completed(family.decoder(config), family.fields)
    max_positions = count(config, "max_position_embeddings")
    rope = {**family.rope, **rope_mapping(config)}
    if rope_scaling is not None:
        rope = replaced(rope, rope_scaling)
    layers = tuple(family.layers(config, RopeSettings(rope, max_positions, tuple(rope_divisors))))
    eos_token_ids = (generation_config or {}).get("eos_token_id")
    return ModelSpec(
        architecture=str(architecture),
        hidden_size=count(config, "hidden_size"),
        max_positions=max_positions,
        rms_norm_eps=positive(config, "rms_norm_eps"),
        layers=layers,
        vocabulary=Vocabulary(
            size=count(config, "vocab_size"),
            eos_token_ids=token_ids(config.get("eos_token_id") if eos_token_ids is None else eos_token_ids),
            tied_embeddings=switch(config, "tie_word_embeddings"),
            multipliers=family.multipliers(config),
        ),
        checkpoint=CheckpointFormat(
            dtype=dtype_name(config),
            quantisation=read_quantisation(config),
        ),
        vision=vision,
    )
