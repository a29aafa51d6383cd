"""`longhelix context`: saves the KV cache of long prompts on disk, for later requests."""

import json as json_module
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from longhelix.cli.help import HELP_FLAGS
from longhelix.cli.options import ContextsFlags, EngineFlags, ModelOptions, contexts_folder, stderr
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag
from longhelix.compute.cache.saved_context import SavedContext
from longhelix.errors import UserError
from longhelix.units import count, duration, size

app = App(name="context", help_flags=HELP_FLAGS)


@app.command
def save(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    *,
    name: str,
    prompt_file: Path,
    replace: Flag = False,
    json: Flag = False,
) -> None:
    """Compute the KV cache of a text and save it under a name.

    Parameters
    ----------
    name
        Name for the saved context.
    prompt_file
        UTF-8 file with the text. A newline at its end is part of the text.
    replace
        Replace an existing context of the same name. Without this option, an existing name is an error.
    json
        Print one JSON object instead of text.
    """
    text = read_text(prompt_file)
    contexts_folder(engine).check_free(name, replace)
    with model.start(engine) as llm:
        start_s = time.monotonic()
        saved = llm.save_context(name, text, replace=replace)
        seconds = time.monotonic() - start_s
    if json:
        print(json_module.dumps(_as_json(saved) | {"save_s": seconds}))
    else:
        said = f"saved {count(saved.num_tokens)} tokens, {size(saved.num_bytes)}, in {duration(seconds)}"
        stderr.print(said, highlight=False)


@app.command(name="list")
def list_(contexts: ContextsFlags = ContextsFlags(), *, json: Flag = False) -> None:  # noqa: B008 - frozen
    """List the saved contexts.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    """
    sound, damaged = [], []
    for name, found in contexts_folder(contexts).manifests().items():
        if isinstance(found, UserError):
            damaged.append({"name": name, "error": str(found)})
        else:
            sound.append(found)
    if json:
        print(json_module.dumps({"contexts": [_as_json(saved) for saved in sound] + damaged}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "tokens", "model", "KV", "size", "saved at"):
        table.add_column(column)
    for saved in sound:
        origin = saved.origin
        table.add_row(
            saved.name, f"{saved.num_tokens:,}", saved.model, origin.kv_dtype, size(saved.num_bytes), saved.saved_at
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for one in damaged:
        print(f"warning: {one['error']}", file=sys.stderr)


@app.command
def load(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    *,
    name: str,
    json: Flag = False,
) -> None:
    """Load a saved context into the ranks of a layout, which verifies all of it, and print how long that took.

    Parameters
    ----------
    name
        Name of the saved context.
    json
        Print one JSON object instead of text.
    """
    contexts_folder(engine).manifest(name)
    with model.start(engine) as llm:
        start_s = time.monotonic()
        loaded = llm.load_context(name)
        seconds = time.monotonic() - start_s
    if json:
        print(json_module.dumps(_as_json(loaded.saved) | {"load_s": seconds}))
    else:
        stderr.print(f"loaded {loaded.saved.num_tokens:,} tokens in {duration(seconds)}", highlight=False)


@app.command
def rm(
    *names: Annotated[str, Parameter(negative=())],
    contexts: ContextsFlags = ContextsFlags(),  # noqa: B008 - frozen
    json: Flag = False,
) -> None:
    """Remove saved contexts.

    Parameters
    ----------
    names
        Names of the saved contexts to remove.
    json
        Print one JSON object with the removed names.
    """
    if not names:
        raise UserError("no name was given: name at least one saved context to remove (see longhelix context list)")
    folder = contexts_folder(contexts)
    for name in names:
        folder.to_remove(name)
    for name in names:
        folder.remove(name)
    if json:
        print(json_module.dumps({"removed": names}))


def _as_json(saved: SavedContext) -> dict[str, Any]:
    origin = saved.origin
    return {
        "name": saved.name,
        "model": saved.model,
        "tokens": saved.num_tokens,
        "bytes": saved.num_bytes,
        "files": len(saved.files),
        "dtype": origin.dtype,
        "kv_dtype": origin.kv_dtype,
        "saved_at": saved.saved_at,
    }
