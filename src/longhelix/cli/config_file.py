"""`--config FILE.yaml`: reads options from a file.

A value on the command line overrides the file. The file overrides the environment variable (LONGHELIX_ and the option's
name in capitals), which overrides the default.
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
# Maps a negative flag, such as no-prefix-cache, to the name of the setting that the flag turns off.
_NEGATIVE = {each.metadata["negative"]: each.name for each in fields(EngineOptions) if each.metadata["negative"]}


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read options from the file of --config and from the environment, unless they are on the command line.

    This function does nothing for commands without --config.

    Raises:
        UserError: the file cannot be read or is invalid, or a key is not an option of the command.
    """
    config = next((each for each in arguments if _FLAG in each.names), None)
    if config is None:
        return
    if config.tokens:
        path = Path(config.tokens[0].value)
        try:
            use_options(_read(path), f"{_FLAG} {path}", app, commands, arguments)
        except UserError as error:
            raise UserError(f"{_FLAG} {path}: {error}", error.code) from error
    _environment(app, commands, arguments)


def use_options(
    found: Mapping[Any, Any], source: str, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Take options by name, unless they are on the command line.

    Args:
        found: values by option.
        source: where they come from, for error messages.

    Raises:
        UserError: a value is invalid, or a key is not an option of the command.
    """
    values = _values(found, _flags(arguments))
    # Nest the values under the command, because cyclopts ignores top-level keys that are also names of commands.
    for command in reversed(commands):
        values = {command: values}
    Dict(values, source=source)(app, commands, arguments)


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise UserError(f"the file is larger than {_MOST_BYTES} bytes: keep only options in it")
        _check_shape(text.decode())
        found = yaml.safe_load(text.decode())
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"the file cannot be read ({error.strerror}): give a YAML file of options") from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError("the file is not valid YAML: write one option per line, such as `port: 8000`") from error
    if not isinstance(found, dict):
        raise UserError("the file has no options: write one per line, such as `port: 8000`")
    return found


def _check_shape(text: str) -> None:
    """Raise UserError for aliases and deep nesting, because they let a small file expand to a huge value."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise UserError("the file has an alias (*NAME), which is not supported: write out its value")
        if depth > _MOST_DEPTH:
            raise UserError(
                f"the file has more than {_MOST_DEPTH} levels: write one option per line, such as `port: 8000`"
            )


def _flags(arguments: ArgumentCollection) -> dict[str, bool]:
    """Return the option names of a command, without `--`. The value says whether the option must be an integer.

    This does not include sizes, because they may have a unit. The converter of sizes checks them later.
    """
    return {
        name[2:]: each.hint in (int, int | None) and not each.parameter.converter
        for each in arguments
        for name in each.names
        if name.startswith("--") and name != _FLAG
    }


def _values(found: Mapping[Any, Any], flags: Mapping[str, bool]) -> dict[str, Any]:
    """Check values, and convert them to the form that cyclopts expects."""
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("_", "-")
        check_names({name: value}, flags)
        if value is None:
            raise UserError(f"{key} has no value: give it a value, or leave it out")
        if isinstance(value, dict):
            value = _object(name, value)
        if flags[name] and (isinstance(value, bool) or not isinstance(value, int)):
            raise refused(name, value, "an integer")
        if name in _NEGATIVE:
            name, value = _NEGATIVE[name].replace("_", "-"), not flag(name, value)
        if name in values:
            raise UserError(f"{name} is set twice: leave one of them out")
        values[name] = value
    return values


def _object(name: str, value: dict[Any, Any]) -> str:
    """Encode a mapping as JSON, which is the format of objects on the command line."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} cannot be written as JSON ({error}): use only strings, numbers, booleans, lists and mappings"
        ) from error
