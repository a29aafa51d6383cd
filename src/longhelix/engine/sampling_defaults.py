"""Sampling settings that a model's publisher recommends."""

import warnings
from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
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

    Models whose configuration turns sampling off get temperature 0. Values out of range are left out with a warning.
    """
    found: dict[str, Any] = {}
    for name in _FIELDS:
        value = generation_config.get(name)
        if name == "top_k" and value == -1:  # as vLLM writes that top-k is off
            value = 0
        if value is None:
            continue
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except UserError as error:
            warnings.warn(f"the model's generation config is not used for {name}: {error}", stacklevel=2)
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def gguf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended settings in the metadata of a GGUF file, as in a generation_config.json."""
    return {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
