"""The check of names: unique classes, and docs and docstrings that name what exists."""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

_SCHEDULER = '''"""Decides what runs next."""

from dataclasses import dataclass


@dataclass
class Scheduler:
    """Schedules; `Scheduler.add` adds a request."""

    limit: int

    def add(self):
        self.added = 1


class Eager(Scheduler):
    pass


def merge(parts):
    """Merge parts."""
'''


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("names", REPOSITORY / ".ci" / "names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    package = tmp_path / "src" / "longhelix" / "scheduler"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "scheduler.py").write_text(_SCHEDULER)
    (tmp_path / "docs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        "See `ops.merge`.",
        "See `Scheduler.no_such`.",
        "See `scheduler.no_such`.",
        "See `scheduler.Scheduler.no_such()`.",
        "See `Eager.no_such`.",
        "See `longhelix.scheduler.gone`.",
        "See scheduler/gone.py.",
        "See `src/longhelix/gone`.",
        "See (docs/gone.md).",
        "See `gone.py`.",
    ],
)
def test_it_finds_wrong_references(check, repository, capsys, wrong):
    (repository / "docs" / "page.md").write_text(f"# Page\n\nText.\n{wrong}\n")
    (repository / "src" / "longhelix" / "text.py").write_text(f'"""Text.\n\n{wrong}\n"""\n\nx = 1  # {wrong}\n')
    assert check.main(repository) == 1
    places = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert places == ["src/longhelix/text.py:3", "src/longhelix/text.py:6", "docs/page.md:4"]


@pytest.mark.parametrize(
    "right",
    [
        "`Scheduler.add`, `Scheduler.limit`, `Scheduler.added`, `Eager.add` and `Scheduler.__init__`",
        "`scheduler.merge`, `scheduler.Scheduler.add(request)` and `longhelix.scheduler.scheduler.merge`",
        "scheduler/scheduler.py, `scheduler.py`, `src/longhelix/scheduler/` and docs/page.md",
        "`usage.prompt_tokens`, `torch.compile`, `Other.thing` and `plan.json`",
        "vllm/config/model.py, and docs/features/fp8.md at 024460769793",
        "[a page](https://example.org/docs/gone.md)",
    ],
)
def test_what_exists_or_belongs_to_others_passes(check, repository, right):
    (repository / "docs" / "page.md").write_text(f"{right}\n")
    assert check.main(repository) == 0


def test_it_finds_public_classes_that_share_a_name(check, repository, capsys):
    package = repository / "src" / "longhelix"
    (package / "other.py").write_text("class _Own:\n    pass\n\n\nclass Scheduler:\n    pass\n")
    (package / "third.py").write_text("class _Own:\n    pass\n")
    assert check.main(repository) == 1
    assert capsys.readouterr().out == (
        "src/longhelix/scheduler/scheduler.py:7: the public class Scheduler shares its name with "
        "src/longhelix/other.py:5\n"
    )


def test_the_repository_names_what_exists(check):
    assert list(check.wrong_references(REPOSITORY, check.Package(REPOSITORY / "src" / "longhelix"))) == []
