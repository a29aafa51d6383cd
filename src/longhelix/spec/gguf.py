"""GGUF files: their metadata, and what a model family says about its files.

A family translates metadata into the settings of its config.json. The reader of configs then makes the model from these
settings, so that a GGUF file and a Hugging Face folder of the same model are the same model.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import count, positive, switch
from longhelix.spec.family import Neutral
from longhelix.values import shown


@dataclass(frozen=True)
class GgufMetadata:
    """The metadata of a GGUF file. Keys are given without the architecture, with which they begin in the file.

    Attributes:
        values: All values by their whole keys.
        tensors: Names of the file's tensors, as in a Hugging Face checkpoint.
    """

    values: Mapping[str, Any]
    tensors: Collection[str] = ()

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`, or an empty string if that is no string."""
        given = self.values.get("general.architecture")
        return given if isinstance(given, str) else ""

    def key(self, name: str) -> str:
        """Return the whole key."""
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        """Return any value. None: the file has no such key."""
        return self.values.get(self.key(name))

    def has(self, name: str) -> bool:
        """Return whether the file has a value for a key."""
        return self.get(name) is not None

    def sets(self, name: str) -> bool:
        """Return whether the file has a value for a key other than 0, which some files have for none."""
        return self.get(name) not in (None, 0)

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer. Without a default, the key is required. Raises UserError."""
        key = self.key(name) if default is not None else self._required(name)
        return count(self.values, key, default, least=least)

    def positive(self, name: str, default: float | None = None) -> float:
        """Read a number above zero. Without a default, the key is required. Raises UserError."""
        return positive(self.values, self.key(name) if default is not None else self._required(name), default)

    def switch(self, name: str, default: bool) -> bool:
        """Read a truth value. Raises UserError."""
        return switch(self.values, self.key(name), default)

    def _required(self, name: str) -> str:
        key = self.key(name)
        if self.values.get(key) is None:
            raise UserError(f"the GGUF file has no metadata key {key!r}", "invalid_model")
        return key


def _always(metadata: GgufMetadata) -> bool:
    return True


@dataclass(frozen=True)
class GgufForm:
    """How a family's models look in GGUF files.

    Attributes:
        architecture: The `general.architecture` of the files.
        settings: Returns settings of config.json. `common_settings` has those that are the same for all families.
        matches: Whether a file is of this family. Needed if several families share an architecture.
        modules: Names of modules in layers, if they are not in `LAYER_MODULES`.
        interleaved: Modules with heads whose rows are stored in the order of interleaved rotation: (pair, half).
            Hugging Face checkpoints have them in the order (half, pair).
        neutral: Keys that longhelix supports with these values only.
        log_multiplier: Returns the rope settings that "rope.scaling.yarn_log_multiplier" stands for. None: the files
            have no such key.
    """

    architecture: str
    settings: Callable[[GgufMetadata], Mapping[str, Any]]
    matches: Callable[[GgufMetadata], bool] = _always
    modules: Mapping[str, str] = field(default_factory=dict)
    interleaved: frozenset[str] = frozenset()
    neutral: Mapping[str, Neutral] = field(default_factory=dict)
    log_multiplier: Callable[[float], Mapping[str, float]] | None = None


# Keys that change results, and that longhelix supports with one meaning only.
NEUTRAL: Mapping[str, Neutral] = {
    "attention.causal": Neutral((True,), "attention to earlier tokens only"),
    "attention.temperature_scale": Neutral((0.0,), "no scaling of queries by their positions"),
}


def read_head_size(metadata: GgufMetadata) -> int:
    """Read the channels of a head of grouped-query attention."""
    default = metadata.count("embedding_length") // metadata.count("attention.head_count")
    return metadata.count("attention.key_length", default)


def grouped_query_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Read the settings of `config_parts.grouped_query`. Whole heads are rotated."""
    size = read_head_size(metadata)
    if metadata.count("rope.dimension_count", size) != size:
        raise UserError(
            "the GGUF file rotates only a part of each head, which longhelix does not support for GGUF files: use the "
            "model's safetensors files"
        )
    num_query_heads = metadata.count("attention.head_count")
    return {"num_key_value_heads": metadata.count("attention.head_count_kv", num_query_heads), "head_dim": size}


def dense_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Read the settings of models with grouped-query attention and dense FFNs."""
    return {**grouped_query_settings(metadata), "intermediate_size": metadata.count("feed_forward_length")}


def expert_settings(metadata: GgufMetadata, expert_size: int | None = None) -> dict[str, Any]:
    """Read the settings of models with grouped-query attention and experts, by Qwen's names.

    expert_size: columns of an expert if the file does not say them.
    """
    return {
        **grouped_query_settings(metadata),
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length", expert_size),
    }


def latent_expert_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Read the settings of models with latent attention and experts, by DeepSeek's names.

    There are two forms of files. New ones have the sizes of a head in the keys that end with "_mla". Their other key
    and value lengths are the sizes of latents.
    """
    suffix = "_mla" if metadata.has("attention.key_length_mla") else ""
    rope_size, rank = metadata.count("rope.dimension_count"), "attention.q_lora_rank"
    return {
        "q_lora_rank": metadata.count(rank, 0, least=0) or None,
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": metadata.count(f"attention.key_length{suffix}") - rope_size,
        "qk_rope_head_dim": rope_size,
        "v_head_dim": metadata.count(f"attention.value_length{suffix}"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0, least=0),
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "n_shared_experts": metadata.count("expert_shared_count", 0, least=0),
        # Files of early versions do not have these keys, not even of models with groups. llama.cpp then uses one group.
        "n_group": metadata.count("expert_group_count", 1),
        "topk_group": metadata.count("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.positive("expert_weights_scale", 1.0),
    }


def both_scales(multiplier: float) -> dict[str, float]:
    """Return the scales that "rope.scaling.yarn_log_multiplier" stands for in files of models with latent attention.

    It is a tenth of mscale_all_dim. Files do not have mscale, which is equal to it in all published models. Cos and sin
    are then not scaled.
    """
    scale = multiplier / 0.1
    return {"mscale": scale, "mscale_all_dim": scale}


def check_neutral(metadata: GgufMetadata, form: GgufForm) -> None:
    """Refuse values that longhelix does not support. Raises UserError."""
    for name, neutral in {**NEUTRAL, **form.neutral}.items():
        value = metadata.get(name)
        is_known = any(type(value) is type(known) and value == known for known in neutral.values)
        if metadata.key(name) in metadata.values and not is_known:
            raise UserError(
                f"{metadata.key(name)} in the GGUF file is {shown(value)}: longhelix supports only "
                f"{shown(neutral.values[0])} ({neutral.meaning})",
                "unsupported_model",
            )
