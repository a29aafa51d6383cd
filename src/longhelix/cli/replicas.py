"""Options of the application for Ray Serve: those of `longhelix serve`, and how many replicas there are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError

from longhelix.cli.config_file import use_options
from longhelix.cli.options import EngineFlags, ModelOptions, given
from longhelix.cli.serve import ServerOptions
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.values import whole

_MOST_REPLICAS, _MOST_THREADS = 4096, 1024
_ONE_NODE = "all ranks of a replica run on one node of Ray"
_NO_EVENTS = "Ray's router does not read KV events"
_REFUSED = {  # options of `longhelix serve` that would have no effect, and why
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "interface": _ONE_NODE,
    "rank_mapping": _ONE_NODE,
    "cluster_secret_file": _ONE_NODE,
    "kv_events_endpoint": _NO_EVENTS,
    "kv_events_replay_endpoint": _NO_EVENTS,
    "kv_events_topic": _NO_EVENTS,
    "trace": "all replicas would write to the same file",
}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class ReplicaOptions:
    """Checked options of a replica, and what it needs."""

    model: ModelOptions
    engine: EngineFlags
    server: ServerOptions
    num_cpus: int  # cores of a replica
    num_gpus: int  # GPUs of a replica
    allow_without_key: bool


@dataclass(frozen=True)
class ApplicationOptions:
    """Checked options of the application."""

    num_replicas: int
    replica: ReplicaOptions


def application_options(arguments: Mapping[str, Any]) -> ApplicationOptions:
    """Return the options of the application.

    Args:
        arguments: values by name, such as {"model": "builtin", "device": "cpu"}. Integers and flags may be text,
            because the command `serve run` passes all values as text.

    Raises:
        UserError: a name is unknown, or a value is invalid.
    """
    found = {name: _parsed(value) if isinstance(value, str) else value for name, value in arguments.items()}
    if "model" not in found:
        raise UserError("the application has no model: set model, such as model=builtin")
    app = App(config=partial(use_options, found, "the arguments"), help_flags=(), version_flags=())
    app.default(_options)
    try:
        return app([], exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise UserError(" ".join(str(error).split())) from error


def _parsed(text: str) -> int | str:
    return int(text) if _INTEGER.fullmatch(text) else _FLAGS.get(text, text)


def _options(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    server: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    *,
    num_replicas: int = 1,
    threads_per_rank: int = 1,
) -> ApplicationOptions:
    whole("num_replicas", num_replicas, 1, _MOST_REPLICAS)
    whole("threads_per_rank", threads_per_rank, 1, _MOST_THREADS)
    server.check()
    _check_paths(model, engine, server)
    layout, settings = model.layout_and_settings(engine)
    options = EngineOptions.of(settings)
    if options.nnodes not in (None, 1):
        raise UserError(f"nnodes is {options.nnodes}, but {_ONE_NODE}: leave out nnodes, or use `longhelix serve`")
    for name, reason in _REFUSED.items():
        if name in settings:
            raise UserError(f"{name} is set, but {reason}: leave it out")
    if options.device == "auto":
        raise UserError(
            "device is not set, but Ray reserves GPUs before longhelix sees the machine: set device to cuda or cpu"
        )
    replica = ReplicaOptions(
        model,
        replace(engine, nnodes=1),  # otherwise a replica would join the hosts that srun started Ray on
        server,
        num_cpus=layout.world_size * threads_per_rank,
        num_gpus=layout.world_size if options.device == "cuda" else 0,
        allow_without_key=options.allow_without_key,
    )
    return ApplicationOptions(num_replicas, replica)


def _check_paths(model: ModelOptions, engine: EngineFlags, server: ServerOptions) -> None:
    """Raise UserError for a relative path, because Ray starts processes in folders of its own."""
    paths = {name: value for name, value in given(engine).items() if isinstance(value, Path)}
    paths["api_key_file"] = server.api_key_file
    if model.layout not in (None, "auto"):
        paths["layout"] = Path(model.layout)
    if model.model.startswith((".", "~")):
        paths["model"] = Path(model.model)
    for name, path in paths.items():
        if path is not None and not path.is_absolute():
            raise UserError(
                f"{name} is {str(path)!r}, but Ray starts processes in other folders: give an absolute path"
            )
