"""Sampling settings that a model's publisher recommends."""

from collections.abc import Mapping
from typing import Any

from longhelix.scheduler.request import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Keys of GGUF files, as llama.cpp reads them.
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended settings in a generation_config.json, by the name of the `SamplingParams` field.

    Models whose configuration turns sampling off get temperature 0.

    Raises:
        UserError: a value is invalid.
    """
    found = {name: generation_config[name] for name in _FIELDS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    SamplingParams(**found)  # checks the values
    return found


def gguf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended settings in the metadata of a GGUF file, as in a generation_config.json."""
    return {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
