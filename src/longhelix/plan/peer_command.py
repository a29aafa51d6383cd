"""What another engine is started with: options by its own documents, a command, and a file of settings beside it."""

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
    """One that a command line, a file of settings or the environment has.

    name: with its dashes on a command line; in a file, the names of its sections before it, with dots between. takes:
    COUNT (1 or more), INDEX (0 or more), TEXT, SWITCH (on a command line without a value), or the words from which to
    choose. source: the file of the engine's repository that says so, and the commit at which it was read.
    """

    name: str
    takes: str | tuple[str, ...]
    source: str

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
    """What starts an engine, or in sentences why there is none (`cannot`).

    environment: assignments before the command. config: settings in a file, whose name the command has. notes:
    sentences on what else it needs. sources: of the options used.
    """

    engine: str
    argv: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """As a shell takes it."""
        return " ".join((*self.environment, shlex.join(self.argv)))

    def as_text(self) -> str:
        """Lines of a shell's script: the command under its notes, or in comments why there is none."""
        lines = [f"# {self.engine}"]
        for sentence in (*(f"cannot: {reason}" for reason in self.cannot), *self.notes):
            lines += comment(sentence)
        if not self.cannot:
            lines += comment(f"Options as read in {', '.join(self.sources)}")
            lines.append(self.line)
        return "\n".join(lines) + "\n"

    def config_yaml(self) -> str:
        """The file beside the command; empty where it has none."""
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
    """An engine's options by name: settings are written through them, which holds them to what each takes.

    Settings that are None are left out.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.known = {option.name: option for option in options}

    def arguments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Settings as arguments of a command, in order, without switches that are off."""
        words: list[str] = []
        for name, value in self._given(settings):
            if value is not False:
                words += [name] if value is True else [name, str(value)]
        return tuple(words)

    def sections(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Settings whose names have dots, as nested sections of a file."""
        root: dict[str, Any] = {}
        for name, value in self._given(settings):
            *sections, key = name.split(".")
            section = root
            for each in sections:
                section = section.setdefault(each, {})
            section[key] = value
        return root

    def assignments(self, settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Settings as variables of the environment."""
        return tuple(f"{name}={value}" for name, value in self._given(settings))

    def sources(self, *settings: Mapping[str, Setting]) -> tuple[str, ...]:
        """Where the settings' options were read, each once."""
        return tuple(dict.fromkeys(self.known[name].source for each in settings for name, _ in self._given(each)))

    def _given(self, settings: Mapping[str, Setting]) -> Iterator[tuple[str, Setting]]:
        for name, value in settings.items():
            if value is not None:
                assert self.known[name].allows(value), (name, value)
                yield name, value
