"""What a model family is: how a config.json of one architecture is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vision import VisionSpec
from longhelix.spec.vocabulary import Multipliers

if TYPE_CHECKING:
    from longhelix.spec.gguf import GgufForm

# What every family's config has, with the value that an absent key stands for.
DECODER: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "dtype": None,
    "torch_dtype": None,
    "eos_token_id": None,
}


class Neutral(NamedTuple):
    """The only values of a field that longhelix runs, and what they mean."""

    values: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class ConfigFields:
    """How the fields of a family's config.json are read.

    Attributes:
        defaults: The value that transformers gives each field that longhelix reads when config.json has no such key.
            Sizes that every published config states have no default (`config_fields.REQUIRED`).
        nullable: Fields that may be null although their default is another value.
        aliases: Second names of fields. Where a config has both, transformers takes this one.
        neutral: Fields that longhelix supports with one meaning only. It refuses other values.
        ignored: Fields that other families read and this one's models do not.
    """

    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Neutral] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """Models of one architecture, which is the `model_type` of config.json.

    Attributes:
        layers: Returns the model's layers. Takes a config with all defaults, and its rope settings.
        fields: How the config's fields are read.
        tensors: Names of a layer's tensors in checkpoints where most families have other names (`spec.weights`).
        rope: Rope settings that count where the config has none of that name.
        decoder: Returns the part of the config that describes the decoder.
        vision: Reads what the decoder knows of images. None if models of the family read no images.
        multipliers: Returns what embeddings and logits are scaled by.
        gguf: How the models look in GGUF files. None: longhelix does not read such files.
    """

    layers: Callable[[Mapping[str, Any], RopeSettings], Iterable[LayerSpec]]
    fields: ConfigFields
    tensors: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    decoder: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    vision: Callable[[Mapping[str, Any]], VisionSpec] | None = None
    multipliers: Callable[[Mapping[str, Any]], Multipliers] = lambda config: Multipliers()
    gguf: "GgufForm | None" = None
