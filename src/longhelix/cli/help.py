"""Help of commands: `--help` shows the options that most people need, `--help-all` shows all of them."""

from typing import Any

from cyclopts import Group, Parameter
from cyclopts.help import DefaultFormatter

HELP, HELP_ALL = "--help", "--help-all"
HELP_FLAGS = (HELP, "-h", HELP_ALL)
RARE = " (more)"  # how the titles of groups with rare options end


def _groups(*titles: str) -> list[Group]:
    """Create groups that help shows in this order."""
    return [Group(title, sort_key=position) for position, title in enumerate(titles)]


MODEL, SERVER, PROMPT, ANSWER, ENGINE, *_RARE_GROUPS = _groups(
    *(titles := ("Model and layout", "Server", "Prompt", "Answer", "Engine")), *(f"{title}{RARE}" for title in titles)
)


def rare(group: Group) -> Group:
    """Return the group for options of `group` that few people need."""
    return next(each for each in _RARE_GROUPS if each.name == f"{group.name}{RARE}")


RARE_SERVER, RARE_ANSWER = (Parameter(group=rare(group)) for group in (SERVER, ANSWER))


class HelpFormatter(DefaultFormatter):
    """Formatter that leaves out the groups of rare options, unless `shows_all`."""

    shows_all = False

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        if self.shows_all or not str(panel.title).endswith(RARE):
            super().__call__(console, options, panel)
