"""Entry point of the command line: runs a command and converts errors to one line of text and an exit status."""

import importlib.metadata
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from longhelix.cli.config_file import from_file
from longhelix.cli.foreign_options import advice
from longhelix.cli.help import ANSWER, HELP_ALL, HELP_FLAGS, PROMPT, SERVER, HelpFormatter
from longhelix.errors import EngineError, RequestError, UserError

USER_ERROR, ENGINE_ERROR, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 1, 130, 141, 143

app = App(
    name="longhelix",
    help="Exact LLM inference with contexts of millions of tokens.",
    version=lambda: importlib.metadata.version("longhelix"),
    config=from_file,
    help_flags=HELP_FLAGS,
    help_formatter=HelpFormatter(),
    help_epilogue="--help-all shows every option of a command.",
)
# Commands are registered by name and imported later, so that `longhelix --help` stays fast.
app.command(
    "longhelix.cli.generate:generate",
    name="generate",
    help="Generate an answer to one prompt.",
    group_parameters=PROMPT,
)
app.command(
    "longhelix.cli.chat.verb:chat", name="chat", help="Chat with a model in the terminal.", group_parameters=ANSWER
)
app.command(
    "longhelix.cli.serve:serve",
    name="serve",
    help="Serve a model over an OpenAI-compatible HTTP API.",
    group_parameters=SERVER,
)
app.command(
    "longhelix.cli.download:download",
    name="download",
    help="Download a model from the Hugging Face Hub, or install the built-in model.",
)
app.command(
    "longhelix.cli.context:app", name="context", help="Save, list, load and remove the KV cache of long prompts."
)
app.command(
    "longhelix.cli.plan:plan", name="plan", help="Find the best layout for a model on a system, and explain why."
)
app.command(
    "longhelix.cli.estimate:estimate", name="estimate", help="Predict the cost of one configuration, item by item."
)
app.command(
    "longhelix.cli.simulate:simulate", name="simulate", help="Simulate serving a workload with predicted step times."
)
app.command("longhelix.cli.bench:app", name="bench", help="Benchmark this machine, longhelix and other engines.")
app.command(
    "longhelix.cli.calibrate:calibrate",
    name="calibrate",
    help="Measure this machine, for predictions with --system local.",
)
app.command(
    "longhelix.cli.collect_env:collect_env",
    name="collect-env",
    help="Print versions, hardware and settings for a bug report.",
)
app.command(
    "longhelix.cli.figures:figures", name="figures", help="Reproduce the figures of the Helix and Medha papers."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: command-line arguments without the program name. None reads the arguments from `sys.argv`.

    Returns:
        The exit status: 0 on success, 2 for a user error, 1 if the engine or a request failed, 130 after Ctrl-C,
        141 if the reader of standard output left early.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    app.help_formatter.shows_all = HELP_ALL in arguments
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(" ".join(_usage(error).split()), "usage", USER_ERROR, as_json)
    except UserError as error:
        return _fail(str(error), error.code, USER_ERROR, as_json)
    except (EngineError, RequestError) as error:
        return _fail(str(error), error.code, ENGINE_ERROR, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
        return BROKEN_PIPE
    return 0


def _usage(error: CycloptsError) -> str:
    """Return what is wrong with the arguments, and what to do."""
    command = " ".join(("longhelix", *(error.command_chain or ())))
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        instead = advice(option, [name for each in error.argument_collection for name in each.names])
        return str(error) if instead is None else f"{option} is not an option of longhelix: {instead}"
    if isinstance(error, UnusedCliTokensError):
        return f"{command} cannot use {error.unused_tokens[0]!r}: leave it out, and see {command} --help"
    if isinstance(error, MissingArgumentError) and error.keyword is None and not error.argument.tokens:
        name = error.argument.name
        name = name.strip("-").upper() if error.argument.field_info.is_positional else name
        return f"{command} needs {name}: see {command} --help"
    return str(error)


def _fail(message: str, code: str, status: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": {"message": message, "code": code}}))
    else:
        print(f"error: {message}", file=sys.stderr)
    return status


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _terminate(number, frame) -> None:
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
