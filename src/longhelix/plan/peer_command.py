"""The command that starts another engine: the engine's documented options, the command line and the settings file."""

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
    """An option on a command line, in a settings file or in the environment."""

    name: str  # with leading dashes on a command line; as section.name in a file
    takes: str | tuple[str, ...]  # COUNT (1 or more), INDEX (0 or more), TEXT, SWITCH (no value), or words
    source: str  # file in the engine's repository that documents the option, and the commit

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
    notes: tuple[str, ...] = ()  # sentences about other requirements
    sources: tuple[str, ...] = ()  # sources of the used options
    cannot: tuple[str, ...] = ()  # reasons why the engine cannot run the deployment

    @property
    def line(self) -> str:
        """Return the command as a single line for a shell."""
        return " ".join((*self.environment, shlex.join(self.argv)))

    def as_text(self) -> str:
        """Return text for a shell script: the notes and the command, or the reasons against it as comments."""
        lines = [f"# {self.engine}"]
        for sentence in (*(f"cannot: {reason}" for reason in self.cannot), *self.notes):
            lines += comment(sentence)
        if not self.cannot:
            lines += comment(f"Options as read in {', '.join(self.sources)}")
            lines.append(self.line)
        return "\n".join(lines) + "\n"

    def config_yaml(self) -> str:
        """Return the text of the settings file; empty if the command needs no settings file."""
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
    """An engine's options by name. The methods format settings and check that the option allows each value.

    Settings with the value None are omitted.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.known = {option.name: option for option in options}

    def arguments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Return settings as command line arguments, in order. Switches that are off are omitted."""
        words: list[str] = []
        for name, value in self._given(settings):
            if value is not False:
                words += [name] if value is True else [name, str(value)]
        return tuple(words)

    def sections(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return settings as nested sections of a file. Dots in the names separate the sections."""
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
