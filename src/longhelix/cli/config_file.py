"""`--config FILE.yaml`: flags from a file, by their own names.

A flag that is given wins over the file, the file over the environment (LONGHELIX_ and the flag's name in capitals), and
that over the default.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict, Env

from longhelix.engine.options import EngineOptions, check_names
from longhelix.errors import UserError
from longhelix.values import flag, refused

_FLAG = "--config"
_MOST_BYTES, _MOST_DEPTH = 65_536, 8
_environment = Env("LONGHELIX_", command=False)
# Of flags that set something to False, what they set.
_NEGATIVE = {each.metadata["negative"]: each.name for each in fields(EngineOptions) if each.metadata["negative"]}


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give a verb's flags the values of the file that its --config names, and of the environment, unless the command
    line has them. Does nothing for verbs without --config. Raises UserError for a file that is none, and for keys that
    are no flags of the verb."""
    config = next((each for each in arguments if _FLAG in each.names), None)
    if config is None:
        return
    if config.tokens:
        path = Path(config.tokens[0].value)
        try:
            found = _values(_read(path), _flags(arguments))
        except UserError as error:
            raise UserError(f"{_FLAG} {path}: {error}", error.code) from error
        # By its verb: cyclopts would pass over flags of a verb that are called as other verbs are.
        for command in reversed(commands):
            found = {command: found}
        Dict(found, source=f"{_FLAG} {path}")(app, commands, arguments)
    _environment(app, commands, arguments)


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise UserError(f"it is larger than {_MOST_BYTES} bytes: leave out what is no flag")
        _check_shape(text.decode())
        found = yaml.safe_load(text.decode())
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"it cannot be read ({error.strerror}): give a YAML file of flags") from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError("it is not YAML: write a flag to a line, such as `port: 8000`") from error
    if not isinstance(found, dict):
        raise UserError("it has no flags: write one to a line, such as `port: 8000`")
    return found


def _check_shape(text: str) -> None:
    """Raise UserError for what would make much of a small file: aliases, and depth."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise UserError("it has an alias (*NAME): write out what it stands for")
        if depth > _MOST_DEPTH:
            raise UserError(f"it has more than {_MOST_DEPTH} levels: write a flag to a line, such as `port: 8000`")


def _flags(arguments: ArgumentCollection) -> dict[str, bool]:
    """The names of a verb's flags, without what they begin with, and whether each wants a whole number. Sizes may have
    a unit, and are looked at later."""
    return {
        name[2:]: each.hint in (int, int | None) and not each.parameter.converter
        for each in arguments
        for name in each.names
        if name.startswith("--") and name != _FLAG
    }


def _values(found: Mapping[Any, Any], flags: Mapping[str, bool]) -> dict[str, Any]:
    """By the flags' names, as cyclopts takes them from files."""
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("_", "-")
        check_names({name: value}, flags)
        if value is None:
            raise UserError(f"{key} has no value: give one, or leave it out")
        if isinstance(value, dict):
            value = _object(name, value)
        if flags[name] and (isinstance(value, bool) or not isinstance(value, int)):
            raise refused(name, value, "a whole number")
        if name in _NEGATIVE:
            name, value = _NEGATIVE[name].replace("_", "-"), not flag(name, value)
        if name in values:
            raise UserError(f"{name} is said twice: leave one of them out")
        values[name] = value
    return values


def _object(name: str, value: dict[Any, Any]) -> str:
    """As the command line has objects."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} has {error}: give names and numbers") from error
