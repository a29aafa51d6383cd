"""Reads layout files: YAML files with degrees and settings, such as those of `longhelix plan --out`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from longhelix.engine.options import EngineOptions, check_names
from longhelix.errors import UserError
from longhelix.values import flag, whole

_MOST_RANKS = 2**20
_DEGREES = ("kvp", "tpa", "tpf", "ep", "pp")


def read_layout(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a layout file.

    Returns:
        The degrees of parallelism and the engine settings in the file.

    Raises:
        UserError: the file cannot be read or is not YAML, or a key or value is invalid.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--layout {path} cannot be read ({error.strerror}): give `auto` or a YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--layout {path} is not valid YAML: write one option per line, such as `kvp: 8`") from error
    if not isinstance(found, dict):
        raise UserError(f"--layout {path} has no options: write one option per line, such as `kvp: 8`")
    settings = [setting.name for setting in fields(EngineOptions)]
    try:
        check_names(found, [*_DEGREES, "tied", *settings])
        degrees = {name: whole(name, found[name], 1, _MOST_RANKS) for name in _DEGREES if name in found}
        degrees |= {"tied": flag("tied", found["tied"])} if "tied" in found else {}
        options = EngineOptions(**{name: found[name] for name in settings if name in found})
    except UserError as error:
        raise UserError(f"--layout {path}: {error}", error.code) from error
    return degrees, {name: getattr(options, name) for name in settings if name in found}
