"""Options of the application for Ray Serve: those of `longhelix serve`, and how many replicas there are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import yaml
from cyclopts import App, CycloptsError

from longhelix.cli.config_file import use_options
from longhelix.cli.options import EngineFlags, ModelOptions
from longhelix.cli.serve import ServerOptions
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.values import whole

_MOST_REPLICAS, _MOST_THREADS = 4096, 1024


@dataclass(frozen=True)
class ReplicaOptions:
    """Checked options of the application, and what each replica needs."""

    model: ModelOptions
    engine: EngineFlags
    server: ServerOptions
    num_replicas: int
    num_cpus: int  # cores of a replica
    num_gpus: int  # GPUs of a replica
    max_running: int  # requests of a replica that run at the same time
    allow_without_key: bool


def replica_options(arguments: Mapping[str, Any]) -> ReplicaOptions:
    """Return the options of the application.

    Args:
        arguments: values by name, such as {"model": "builtin", "device": "cpu"}. Text is read as YAML, because the
            command `serve run` passes all values as text.

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


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _options(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    server: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    *,
    num_replicas: int = 1,
    threads_per_rank: int = 1,
) -> ReplicaOptions:
    whole("num_replicas", num_replicas, 1, _MOST_REPLICAS)
    whole("threads_per_rank", threads_per_rank, 1, _MOST_THREADS)
    server.check()
    layout, settings = model.layout_and_settings(engine)
    options = EngineOptions.of(settings)
    if options.nnodes not in (None, 1):
        raise UserError(
            f"nnodes is {options.nnodes}, but all ranks of a replica run on one node of Ray: leave out nnodes, or use "
            "`longhelix serve`"
        )
    if options.device == "auto":
        raise UserError(
            "device is not set, but Ray reserves GPUs before longhelix sees the machine: set device to cuda or cpu"
        )
    return ReplicaOptions(
        model,
        replace(engine, nnodes=1),  # otherwise a replica would join the hosts that srun started Ray on
        server,
        num_replicas,
        num_cpus=layout.world_size * threads_per_rank,
        num_gpus=layout.world_size if options.device == "cuda" else 0,
        max_running=options.max_running,
        allow_without_key=options.allow_without_key,
    )
