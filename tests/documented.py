"""The `longhelix` and `curl` commands in README and docs."""

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "deploy" / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PREDICTIONS = ("plan", "estimate", "simulate")


def blocks(page: Path, languages: str = r"\w*") -> list[str]:
    """Return the code blocks of a page in some languages, a regular expression."""
    found = re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return list(found)


def lines(page: Path) -> list[str]:
    """Return the lines of all code blocks of a page. Continued lines are joined."""
    return "\n".join(blocks(page)).replace("\\\n", " ").splitlines()


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `longhelix` command in the code blocks of a page."""
    return [shlex.split(line, comments=True)[1:] for line in lines(page) if re.match(r"(\.venv/bin/)?longhelix ", line)]


EVERY_COMMAND = sorted({tuple(command) for page in PAGES for command in commands(page)})
NEEDS_NO_FILES = [command for command in EVERY_COMMAND if not re.search(r"/|FOLDER|\.\w{3,}( |$)", " ".join(command))]
PREDICTED = [command for command in NEEDS_NO_FILES if command[0] in PREDICTIONS]
ANSWERED = [command for command in NEEDS_NO_FILES if command[0] == "generate" and "--context" not in command]
# Downloads need the network. Other commands with a hub ID run with a folder of that name.
NEEDS_NETWORK = [command for command in EVERY_COMMAND if command[0] == "download"]
RUN_WITHOUT_FILES = [*PREDICTED, *ANSWERED, ("collect-env",)]
EVERY_REQUEST = [line for page in PAGES for line in lines(page) if line.startswith("curl ")]
# Programs that need neither a server nor a model from elsewhere.
EVERY_PROGRAM = [
    (page.relative_to(REPOSITORY), program)
    for page in PAGES
    for program in blocks(page, "python")
    if re.search(r'LLM\("builtin"|^from longhelix import merge_states', program, re.MULTILINE)
]
