"""Represent the command that starts another engine: its command line, environment variables and settings file."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longhelix.plan.deployment import comment

COUNT, INDEX, TEXT, SWITCH = "count", "index", "text", "switch"
Setting = int | str | bool | None


@dataclass(frozen=True)
class Option:
    """An option of an engine: a command line option, a field of the settings file, or an environment variable."""

    name: str  # with leading dashes on a command line; as section.name in a file
    takes: str | tuple[str, ...]  # COUNT (1 or more), INDEX (0 or more), TEXT, SWITCH (no value), or the allowed words
    source: str  # file in the engine's repository that documents the option, and the commit of the file

    def allows(self, value: Setting) -> bool:
        match self.takes:
            case "switch":
                return isinstance(value, bool)
            case "count" | "index":
                least = 1 if self.takes == COUNT else 0
                return isinstance(value, int) and not isinstance(value, bool) and value >= least
            case "text":
                return isinstance(value, str) and value != ""
            case words:
                return value in words


@dataclass(frozen=True)
class PeerCommand:
    """The command that starts an engine, or the reasons why the engine cannot run the deployment."""

    engine: str
    argv: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()  # assignments of environment variables before the command
    config: Mapping[str, Any] = field(default_factory=dict)  # content of the settings file
    notes: tuple[str, ...] = ()  # other requirements, as sentences
    sources: tuple[str, ...] = ()  # sources of the options that the command uses
    cannot: tuple[str, ...] = ()  # reasons why the engine cannot run the deployment

    @property
    def line(self) -> str:
        """Return the command as a single line for a shell."""
        return " ".join((*self.environment, shlex.join(self.argv)))

    def as_text(self) -> str:
        """Return the command as text for a shell script, with the notes as comments.

        If the engine cannot run the deployment, the text contains the reasons as comments instead of the command.
        """
        lines = [f"# {self.engine}"]
        for sentence in (*(f"cannot: {reason}" for reason in self.cannot), *self.notes):
            lines += comment(sentence)
        if not self.cannot:
            lines += comment(f"Sources of the options: {', '.join(self.sources)}")
            lines.append(self.line)
        return "\n".join(lines) + "\n"

    def config_yaml(self) -> str:
        """Return the YAML text of the settings file. The text is empty if the command needs no settings file."""
        return "".join(f"{line}\n" for line in _yaml(self.config, ""))


def _yaml(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(value, indent + "  ")
        else:
            # JSON scalars are also YAML scalars.
            yield f"{indent}{name}: {json.dumps(value)}"


class Options:
    """An engine's options by name. The methods check the values of settings and format the settings.

    Settings with the value None are omitted.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.known = {option.name: option for option in options}

    def arguments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Return settings as command line arguments in the given order, without switches that are off."""
        words: list[str] = []
        for name, value in self._given(settings):
            if value is not False:
                words += [name] if value is True else [name, str(value)]
        return tuple(words)

    def sections(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return settings as nested sections of the settings file. Dots in a name separate sections and key."""
        root: dict[str, Any] = {}
        for name, value in self._given(settings):
            *sections, key = name.split(".")
            section = root
            for each in sections:
                section = section.setdefault(each, {})
            section[key] = value
        return root

    def assignments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Return settings as assignments of environment variables."""
        return tuple(f"{name}={value}" for name, value in self._given(settings))

    def sources(self, *settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Return the sources of the options that the settings use, without duplicates."""
        return tuple(dict.fromkeys(self.known[name].source for each in settings for name, _ in self._given(each)))

    def _given(self, settings: Mapping[str, Setting]) -> Iterator[tuple[str, Setting]]:
        for name, value in settings.items():
            if value is not None:
                assert self.known[name].allows(value), (name, value)
                yield name, value
