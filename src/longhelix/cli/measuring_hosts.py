"""Commands that measure on several hosts. Every host runs the same command."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from longhelix.cli.options import HostFlags, given

if TYPE_CHECKING:  # imports torch, so commands import it only when they run
    from longhelix.measure.hosts import MeasuringHosts


@contextmanager
def together(flags: HostFlags) -> "Iterator[MeasuringHosts | None]":
    """Meet the hosts that run the same command. Yields None for a command on one host.

    If the body fails, the other hosts end with the same error.
    """
    from longhelix.measure.hosts import MeasuringHosts

    met = MeasuringHosts.of(given(flags), common_words(sys.argv[1:]), tell)
    try:
        yield met
    except BaseException as error:
        if met is not None:
            met.leave(error)
        raise
    if met is not None:
        met.end()


def common_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command that are the same on all hosts."""
    own = {f"--{field.name.replace('_', '-')}" for field in fields(HostFlags)}
    kept, is_value = [], False
    for word in words:
        name, has_value, _ = word.partition("=")
        if not is_value and name not in own:
            kept.append(word)
        is_value = name in own and not has_value and name != "--allow-without-secret"
    return kept


def tell(line: str) -> None:
    """Print a line about progress."""
    print(line, file=sys.stderr)
