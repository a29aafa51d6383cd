"""Entry of the command line: runs a verb, and turns every error into one sentence and an exit status."""

import importlib.metadata
import json
import signal
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from longhelix.cli.config_file import from_file
from longhelix.errors import EngineError, RequestError, UserError

USER_ERROR, ENGINE_ERROR, INTERRUPTED, TERMINATED = 2, 1, 130, 143

app = App(
    name="longhelix",
    help="Exact LLM inference with contexts of millions of tokens.",
    version=lambda: importlib.metadata.version("longhelix"),
    config=from_file,
)
# Named, not imported: a verb loads when it is called.
app.command("longhelix.cli.generate:generate", name="generate", help="Answer one prompt.")
app.command("longhelix.cli.chat.verb:chat", name="chat", help="Talk with a model.")
app.command("longhelix.cli.serve:serve", name="serve", help="Serve a model over HTTP, as OpenAI's interface has it.")
app.command("longhelix.cli.context:app", name="context", help="Keep the KV of long prompts: save, list, load, rm.")
app.command("longhelix.cli.plan:plan", name="plan", help="Search layouts: frontier, best layout, reasons.")
app.command("longhelix.cli.estimate:estimate", name="estimate", help="Take one configuration's step apart.")
app.command("longhelix.cli.simulate:simulate", name="simulate", help="Serve a trace of requests on a predicted clock.")
app.command("longhelix.cli.bench:app", name="bench", help="Measure this machine, longhelix on it, and its peers.")
app.command("longhelix.cli.calibrate:calibrate", name="calibrate", help="Measure this machine for estimate and plan.")
app.command("longhelix.cli.collect_env:collect_env", name="collect-env", help="Say what longhelix finds here.")
app.command("longhelix.cli.figures:figures", name="figures", help="Draw the papers' figures, published and modelled.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for a user's error, 1 for a failed engine."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(" ".join(str(error).split()), "usage", USER_ERROR, as_json)
    except UserError as error:
        return _fail(str(error), error.code, USER_ERROR, as_json)
    except (EngineError, RequestError) as error:
        return _fail(str(error), error.code, ENGINE_ERROR, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


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
