"""Settings in YAML files, such as `longhelix plan --out` writes."""

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
    """The degrees of parallelism, and the engine's settings, that a YAML file has; raises UserError for a file, key or
    value that is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--layout {path} cannot be read ({error.strerror}): give `auto` or a YAML file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--layout {path} is not YAML: write it as `longhelix plan --out` does") from error
    if not isinstance(found, dict):
        raise UserError(f"--layout {path} holds no options: write it as `longhelix plan --out` does")
    settings = [setting.name for setting in fields(EngineOptions)]
    try:
        check_names(found, [*_DEGREES, "tied", *settings])
        degrees = {name: whole(name, found[name], 1, _MOST_RANKS) for name in _DEGREES if name in found}
        degrees |= {"tied": flag("tied", found["tied"])} if "tied" in found else {}
        options = EngineOptions(**{name: found[name] for name in settings if name in found})
    except UserError as error:
        raise UserError(f"--layout {path}: {error}", error.code) from error
    return degrees, {name: getattr(options, name) for name in settings if name in found}
