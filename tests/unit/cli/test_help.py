"""Help of every command fits a terminal of 100 columns."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from longhelix.cli import foreign_options
from longhelix.cli.foreign_options import advice
from longhelix.cli.main import app, main

pytestmark = pytest.mark.unit

COLUMNS = 100
GUIDE = Path(__file__).parents[3] / "docs/guides/from-vllm.md"


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


def shown(capsys, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_shows_what_most_people_need_and_help_all_the_rest(capsys, command):
    few, every = (set(re.findall(r"^│[ *]+(?:MODEL )?(--[a-z0-9-]+)", shown(capsys, command, option), re.MULTILINE))
                  for option in ("--help", "--help-all"))  # fmt: skip
    assert few < every
    assert len(few) <= 25 < 45 < len(every)
    assert {"--model", "--kvp", "--tpa", "--max-model-len"} <= few
    expert = {"--flash-comm-v1", "--compilation-config", "--hop-b", "--swap-tokens", "--tied"}
    assert not expert & few
    assert expert <= every
    panels = re.findall(r"^╭─ (.+?) ─", shown(capsys, command, "--help"), re.MULTILINE)
    assert panels[0] == "Model and layout"
    assert shown(capsys, command, "--help").endswith("--help-all shows every option of a command.\n")


def test_the_model_may_be_positional():
    for arguments in (["builtin", "--kvp", "2"], ["--kvp", "2", "builtin"], ["--model", "builtin", "--kvp", "2"]):
        _, bound, _ = app.parse_args(["serve", *arguments], print_error=False, exit_on_error=False)
        assert (bound.arguments["model"].model, bound.arguments["model"].kvp) == ("builtin", 2)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tensor-parallel-size", "--tensor-parallel-size is not an option of longhelix: use --tpa for attention"),
        ("--tensor_parallel_size", "use --tpa for attention"),
        ("-ngl", "use --device cuda"),
        ("--ctx-size", "use --max-model-len"),
        ("-c", "use --max-model-len"),
        ("--n-predict", "use --max-new-tokens"),
        ("--gpu-memory-utilization=0.9", "use --kv-cache-tokens"),
        ("--trust-remote-code", "longhelix never runs code from a model repository"),
    ],
)
def test_options_of_other_engines_name_ours(capsys, option, words):
    assert main(["generate", "builtin", option, "2"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "longhelix generate needs MODEL: see longhelix generate --help"),
        (["plan", "builtin"], "longhelix plan needs --system: see"),
        (["context", "load", "builtin"], "longhelix context load needs --name: see longhelix context load --help"),
        (["generate", "builtin", "a prompt"], "longhelix generate cannot use 'a prompt': leave it out, and see"),
        (["plan", "builtin", "--system"], "--system requires an argument"),
    ],
)
def test_missing_and_surplus_arguments_are_named(capsys, arguments, words):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err


@pytest.mark.parametrize("arguments", [["collect-env"], ["plan", "builtin", "--system", "h100", "--context", "1K"]])
def test_a_reader_that_leaves_early_ends_a_command_quietly(arguments):
    command = subprocess.Popen(
        [sys.executable, "-m", "longhelix", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.close()
    assert command.stderr.read() == ""
    assert command.wait(60) != 0


def test_the_guides_table_of_other_engines_options_says_what_the_command_line_says():
    section = GUIDE.read_text().split("## Options")[1].split("\n## ")[0]
    told = 0
    for options, words in re.findall(r"^\| (.+) \| (.+?) \|$", section, re.MULTILINE):
        for option in re.findall(r"`(--?[\w-]+)`", options):
            said = words.replace("`", "")
            assert said == advice(option, re.findall(r"--[a-z0-9-]+", said)), option
            told += 1
    assert told >= 60


def test_advice_names_only_options_of_the_command(capsys):
    assert main(["plan", "builtin", "--tensor-parallel-size", "2"]) == 2
    assert "--tpa" not in capsys.readouterr().err


def test_help_all_is_for_commands_below_others_too(capsys):
    assert "--tied" in shown(capsys, "context", "save", "--help-all")
    assert "--tied" not in shown(capsys, "context", "save", "--help")
    assert shown(capsys, "bench", "decode", "--help-all")


def test_what_other_engines_options_name_exists(capsys):
    """Each option of ours in the advice is an option of `serve` or `generate`."""
    known = {option for command in ("serve", "generate")
             for option in re.findall(r"--[a-z0-9-]+", shown(capsys, command, "--help-all"))}  # fmt: skip
    named = {option for advice in foreign_options._ADVICE.values() for option in re.findall(r"--[a-z0-9-]+", advice)}
    assert named <= known
    assert len(foreign_options._ADVICE) >= 60


def test_commands_below_others_are_looked_at():
    assert {("serve",), ("context", "save"), ("bench", "decode")} <= set(EVERY_COMMAND)
