"""Help of every command fits a terminal of 100 columns."""

import io

import pytest
from rich.console import Console

from longhelix.cli.main import app

pytestmark = pytest.mark.unit

COLUMNS = 100


def commands(application, path=()):
    """The words of every command and of every command below it."""
    for name in application:
        if not name.startswith("-"):
            yield (*path, name)
            yield from commands(application[name], (*path, name))


EVERY_COMMAND = [(), *commands(app)]


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_help_fits_100_columns(command):
    console = Console(file=io.StringIO(), width=COLUMNS)
    app.help_print(command, console=console)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith(" ".join(("Usage: longhelix", *command)))
    assert max(map(len, lines)) <= COLUMNS


def test_commands_below_others_are_looked_at():
    assert {("serve",), ("context", "save"), ("bench", "decode")} <= set(EVERY_COMMAND)
