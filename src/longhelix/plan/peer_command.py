"""The command that starts another engine: its documented options, the command line and its settings file."""

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

    name: str  # with dashes on a command line; with its sections before it and dots between in a file
    takes: str | tuple[str, ...]  # COUNT (1 or more), INDEX (0 or more), TEXT, SWITCH (no value), or the allowed words
    source: str  # file of the engine's repository that documents it, and the commit at which it was read

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
    """The command that starts an engine, or the reasons why it cannot run the deployment."""

    engine: str
    argv: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()  # assignments before the command
    config: Mapping[str, Any] = field(default_factory=dict)  # content of the settings file that the command names
    notes: tuple[str, ...] = ()  # sentences on what else it needs
    sources: tuple[str, ...] = ()  # of the options used
    cannot: tuple[str, ...] = ()  # sentences on why it cannot run

    @property
    def line(self) -> str:
        """The command as one line for a shell."""
        return " ".join((*self.environment, shlex.join(self.argv)))

    def as_text(self) -> str:
        """Text for a shell script: the command below its notes, or the reasons against it as comments."""
        lines = [f"# {self.engine}"]
        for sentence in (*(f"cannot: {reason}" for reason in self.cannot), *self.notes):
            lines += comment(sentence)
        if not self.cannot:
            lines += comment(f"Options as read in {', '.join(self.sources)}")
            lines.append(self.line)
        return "\n".join(lines) + "\n"

    def config_yaml(self) -> str:
        """The text of the settings file; empty if the command needs none."""
        return "".join(f"{line}\n" for line in _yaml(self.config, ""))


def _yaml(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(value, indent + "  ")
        else:
            # JSON's scalars are YAML's.
            yield f"{indent}{name}: {json.dumps(value)}"


class Options:
    """An engine's options by name, which write settings and check that each value is allowed.

    Settings with the value None are left out.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.known = {option.name: option for option in options}

    def arguments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Settings as command line arguments, in order. Switches that are off are left out."""
        words: list[str] = []
        for name, value in self._given(settings):
            if value is not False:
                words += [name] if value is True else [name, str(value)]
        return tuple(words)

    def sections(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Settings with dots in their names as nested sections of a file."""
        root: dict[str, Any] = {}
        for name, value in self._given(settings):
            *sections, key = name.split(".")
            section = root
            for each in sections:
                section = section.setdefault(each, {})
            section[key] = value
        return root

    def assignments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Settings as assignments of environment variables."""
        return tuple(f"{name}={value}" for name, value in self._given(settings))

    def sources(self, *settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """The sources of the settings' options, each once."""
        return tuple(dict.fromkeys(self.known[name].source for each in settings for name, _ in self._given(each)))

    def _given(self, settings: Mapping[str, Setting]) -> Iterator[tuple[str, Setting]]:
        for name, value in settings.items():
            if value is not None:
                assert self.known[name].allows(value), (name, value)
                yield name, value
