"""Commands in README and docs are valid and run, and pages that are filled from the code can be filled."""

import importlib.util
import re

import pytest

from documented import ANSWERED, EVERY_COMMAND, PAGES, PREDICTED, PREDICTIONS, REPOSITORY, RUN_WITHOUT_FILES
from longhelix.cli.main import app, main

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_there_are_commands_of_each_kind():
    assert {command[0] for command in PREDICTED} == set(PREDICTIONS)
    assert ANSWERED


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_every_command_has_known_options(command):
    app.parse_args(command, exit_on_error=False, print_error=False)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_WITHOUT_FILES, ids=" ".join)
def test_commands_that_need_no_files_run(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    assert capfd.readouterr().out


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts], ids=lambda page: page.name)
def test_marks_of_a_page_are_filled(hooks, page):
    text = page.read_text(encoding="utf-8")
    filled = hooks.on_page_markdown(text)
    assert not re.search(r"^\{\{", filled, re.MULTILINE)


def test_references_name_what_the_code_has(hooks):
    text = {name: fill() for name, fill in hooks._REFERENCES.items()}
    assert "`--kv-cache-tokens`" in text["command-line"]
    assert "## `longhelix context save`" in text["command-line"]
    assert "`POST /v1/chat/completions`" in text["http"]
    assert "`longhelix:kv_blocks`" in text["metrics"]
    assert "`kv_cache_tokens`" in text["engine-settings"]
    assert "| `deepseek_v3` | yes |" in text["families"]
    assert "| `qwen3_next` | no: linear attention (Gated DeltaNet), " in text["families"]


def test_every_option_of_the_reference_has_a_meaning(hooks):
    rows = re.findall(r"^\| `--.*$", hooks._REFERENCES["command-line"](), re.MULTILINE)
    assert len(rows) > 200
    meanings = [re.split(r"(?<!\\)\|", row)[-2].strip() for row in rows]
    assert not [row for row, meaning in zip(rows, meanings, strict=True) if not re.match(r"[A-Za-z`]", meaning)]
    assert not [row for row, meaning in zip(rows, meanings, strict=True) if meaning in ("", "Required.")]
