"""Models and systems known by name: configurations and tables that come with the package, or files of the user's."""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longhelix.errors import UserError
from longhelix.spec import HardwareSpec, ModelSpec, gguf_quantisation, read_hf_config

__all__ = [
    "load_model",
    "load_system",
    "local_system_path",
    "model_names",
    "system_names",
    "with_quantisation_file",
    "write_system",
]

_FOLDER = Path(__file__).parent
_BUILTIN = "smollm2-135m"
# Kinds of the matrices in the built-in model's GGUF file, for plans without the file.
_BUILTIN_EMBEDDING, _BUILTIN_LAYERS = "Q8_0", "Q4_1"
_BUILTIN_MODULES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def model_names() -> tuple[str, ...]:
    """The models that need no files, sorted."""
    return _names("models", ".json")


def system_names() -> tuple[str, ...]:
    """The systems that need no measurement, sorted."""
    return _names("systems", ".toml")


def load_model(name_or_path: str) -> ModelSpec:
    """A model by name, "builtin", a folder with config.json, or such a file itself; it need not be one that runs.

    Raises UserError: code "unknown_model" where there is none, else that of what is wrong with it.
    """
    name = name_or_path
    if name == "builtin":
        return _builtin()
    if name in model_names():
        path = _FOLDER / "models" / f"{name}.json"
    elif os.path.isdir(name):
        path = Path(name) / "config.json"
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing: give a Hugging Face model folder", "unknown_model")
    elif name.endswith(".json") and os.path.isfile(name):
        path = Path(name)
    else:
        raise UserError(
            f"there is no model {name!r}: give {_nearest(name, (*model_names(), 'builtin'))}, or a folder with "
            "config.json",
            "unknown_model",
        )
    return read_hf_config(with_quantisation_file(_read_json(path), path.parent))


def _builtin() -> ModelSpec:
    """The built-in model, with its weights as its GGUF file packs them."""
    spec = load_model(_BUILTIN)
    modules = (f"model.layers.{layer}.{module}" for layer in range(spec.num_layers) for module in _BUILTIN_MODULES)
    kinds = {"model.embed_tokens": _BUILTIN_EMBEDDING} | dict.fromkeys(modules, _BUILTIN_LAYERS)
    return spec.quantised_by(gguf_quantisation(kinds))


def with_quantisation_file(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return a folder's config with the quantisation that NVIDIA's checkpoints have in hf_quant_config.json.

    Raises UserError if that file cannot be read.
    """
    path = folder / "hf_quant_config.json"
    if config.get("quantization_config") or not os.path.isfile(path):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt"} | _quantisation(path)}


def load_system(name_or_path: str) -> HardwareSpec:
    """A system by name, "local" (this machine, once calibrated), or a .toml file of the same form.

    Raises UserError: code "unknown_system" where there is none, "invalid_system" where it is not sound.
    """
    name = name_or_path
    if name == "local":
        path = local_system_path()
        if path is None or not os.path.isfile(path):
            raise UserError("the system local has not been measured: run longhelix calibrate", "unknown_system")
    elif name in system_names():
        path = _FOLDER / "systems" / f"{name}.toml"
    elif name.endswith(".toml") and os.path.isfile(name):
        path, name = Path(name), Path(name).stem
    else:
        raise UserError(
            f"there is no system {name!r}: give {_nearest(name, (*system_names(), 'local'))}, or a .toml file",
            "unknown_system",
        )
    return HardwareSpec.from_mapping(name, _read_toml(path))


def local_system_path() -> Path | None:
    """Where calibration writes the system "local" (XDG base directories: data of the user's). None for a user without
    a home."""
    with suppress(RuntimeError):
        data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data_home, "longhelix", "local.toml")
    return None


def write_system(system: HardwareSpec, path: Path) -> None:
    """Write a system as a file that `load_system` reads, folders included. Raises UserError where that cannot be."""
    # A string, a number or a truth value is the same in TOML as in JSON.
    lines = [
        f"{key} = {{ value = {json.dumps(value)}, source = {json.dumps(system.sources[key], ensure_ascii=False)} }}\n"
        for key, value in system.constants.items()
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another file") from error


def _quantisation(path: Path) -> dict[str, Any]:
    settings = _read_json(path).get("quantization")
    if not isinstance(settings, dict):
        raise UserError(f"{path} has no settings under quantization: download it again", "invalid_model")
    return settings


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): download it again", "invalid_model") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}", "invalid_model")
    return content


def _names(folder: str, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(entry.removesuffix(suffix) for entry in os.listdir(_FOLDER / folder)))


def _nearest(name: str, known: Sequence[str]) -> str:
    """The known names that `name` may stand for, or all of them."""
    return ", ".join(difflib.get_close_matches(name.lower(), known) or known)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as TOML ({error}): correct it there", "invalid_system") from error
