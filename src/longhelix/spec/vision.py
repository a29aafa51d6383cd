"""Vision-language models: what their decoder knows of images, and where their configuration keeps what it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import count
from longhelix.values import refused, whole

# What transformers takes for an absent key: frequency pairs of each axis, tokens of images, and parts of the tower.
DEFAULT_SECTIONS = (24, 20, 20)
_TOKENS = {"image": 151655, "vision_start": 151652, "vision_end": 151653}
_OUT_SIZE, _DEPTH, _TAPS = 3584, 27, (8, 16, 24)


@dataclass(frozen=True)
class VisionSpec:
    """What the decoder knows of images, whose tower is not its own.

    image_token_id: what stands in a prompt where an image is, once for each of its tokens; start_token_id,
    end_token_id: before the first and after the last of these. num_deepstack: after each of so many first layers the
    tower's features of a layer of its own are added to the image's rows (DeepStack, arXiv 2406.04334).
    """

    image_token_id: int
    start_token_id: int
    end_token_id: int
    num_deepstack: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "VisionSpec":
        """Read the config.json of a vision-language model; raises UserError."""
        tower, decoder = _part(config, "vision_config"), _part(config, "text_config")
        given, taken = count(tower, "out_hidden_size", _OUT_SIZE), count(decoder, "hidden_size")
        if given != taken:
            raise UserError(
                f"the vision tower outputs {given} values per token, but the decoder expects {taken}: correct "
                "out_hidden_size or hidden_size in the model's config",
                "invalid_model",
            )
        image, start, end = (count(config, f"{name}_token_id", token_id, least=0) for name, token_id in _TOKENS.items())
        return cls(image, start, end, _num_deepstack(tower))


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a vision-language model's config that is its decoder's, with what is said of both."""
    decoder = dict(_part(config, "text_config"))
    shared = ("dtype", "torch_dtype", "quantization_config", "compression_config")
    decoder |= {key: config[key] for key in shared if config.get(key) is not None}
    return decoder | {
        "model_type": config["model_type"],
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def _num_deepstack(tower: Mapping[str, Any]) -> int:
    name, taps = "deepstack_visual_indexes in the model's settings", tower.get("deepstack_visual_indexes", _TAPS)
    if not isinstance(taps, (list, tuple)):
        raise refused(name, taps, "a list of layers", "invalid_model")
    last = count(tower, "depth", _DEPTH) - 1
    layers = {whole(f"a layer of {name}", layer, 0, last, code="invalid_model") for layer in taps}
    if len(layers) < len(taps):
        raise refused(name, taps, "a list of different layers", "invalid_model")
    return len(layers)


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key)
    if not isinstance(part, Mapping):
        raise UserError(f"the model's config has no {key}: give the complete config of the model", "invalid_model")
    return part
