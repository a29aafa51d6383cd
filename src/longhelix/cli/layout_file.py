"""Layouts in files, as `longhelix plan --out` writes them."""

from pathlib import Path
from typing import Any

import yaml

from longhelix.errors import UserError

_NUMBERS = ("kvp", "tpa", "tpf", "ep", "pp", "max_model_len", "kv_cache_tokens")
_WORDS = ("placement", "weight_dtype", "kv_dtype")
_KINDS = dict.fromkeys(_NUMBERS, (int, "a whole number")) | dict.fromkeys(_WORDS, (str, "a word"))
_KINDS["tied"] = (bool, "true or false")


def read_layout(path: Path) -> dict[str, Any]:
    """The options that a YAML file sets; raises UserError for a file, key or value that is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--layout {path} cannot be read ({error.strerror}): give `auto` or a YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--layout {path} is not YAML: write it as `longhelix plan --out` does") from error
    if not isinstance(found, dict):
        raise UserError(f"--layout {path} holds no options: write it as `longhelix plan --out` does")
    for key, value in found.items():
        if key not in _KINDS:
            raise UserError(f"--layout {path} sets {key!r}, which is not known: use {', '.join(_KINDS)}")
        kind, words = _KINDS[key]
        if type(value) is not kind:
            raise UserError(f"--layout {path} has {key} = {value!r}: set it to {words}")
    return found
