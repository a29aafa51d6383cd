"""`longhelix serve`: an OpenAI-compatible HTTP server."""

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from longhelix.cli.help import RARE_SERVER, SERVER, rare
from longhelix.cli.options import (
    EngineFlags,
    GenerationConfig,
    ModelOptions,
    describe,
    given,
    held_tokens,
    parsed_object,
)
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Seconds, Size
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.hub.model import HubModel
from longhelix.engine.text.reasoning import PARSERS
from longhelix.errors import UserError
from longhelix.serve.server_log import ServerLog
from longhelix.values import seconds, whole

if TYPE_CHECKING:
    from longhelix.serve.gate import AccessControl
    from longhelix.serve.serving import Serving

_KEY_VARIABLE = "LONGHELIX_API_KEY"
_IMAGE_BYTES = 64_000_000  # added to the default --max-body-bytes if the model reads images
# Defaults for many clients, which differ from the defaults for a single prompt.
_DEFAULTS = {"policy": "lars", "placement": "auto", "kv_cache_tokens": "auto"}


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options for the server, except for the address that it listens on."""

    served_model_name: str | None = None
    "Model name that clients use. [default: the hub ID, or the last part of the path]"
    api_key_file: Path | None = None
    """File of API keys, one per line. Clients send one as `Authorization: Bearer KEY`; the environment variable
    LONGHELIX_API_KEY adds another."""
    max_waiting_requests: Annotated[int, RARE_SERVER] = 1024
    "Maximum number of requests that wait for their first token. Further requests get status 429."
    max_waiting_tokens: Annotated[Size, RARE_SERVER] = 64_000_000
    "Maximum number of prompt tokens in all waiting requests together. Further requests get status 429."
    max_body_bytes: Annotated[Size | None, RARE_SERVER] = None
    """Maximum size of a request body. [default: 1 MB, plus 16 bytes per token of --max-model-len, plus 64 MB if the
    model reads images]"""
    max_restarts: Annotated[int, RARE_SERVER] = 3
    "Restart a failed engine at most this many times per hour. Running requests continue after a restart."
    max_replays: Annotated[int, RARE_SERVER] = 1
    """Engine failures in a row that a running request survives; after one more it ends with an error. The count starts
    again when the request has two new tokens."""
    drain: Annotated[Seconds, Parameter(group=rare(SERVER), show_default=False)] = 60.0
    "Time for running requests to finish after SIGTERM or Ctrl-C, such as 30s. [default: 60 s]"
    generation_config: GenerationConfig = "auto"
    """Where the defaults for sampling come from: auto takes them from the model's generation_config.json or GGUF file,
    none uses OpenAI's, which is temperature 1."""
    reasoning_parser: Literal[PARSERS] = "auto"
    """Format of the model's reasoning, which is returned separately from the content. auto detects it from the chat
    template and the vocabulary; none leaves the reasoning in the content."""
    metrics_prefix: Annotated[str, RARE_SERVER] = "longhelix"
    "Prefix of the metric names at /metrics. Set it to vllm to use dashboards made for vLLM."
    log_format: Annotated[Literal["text", "json"], RARE_SERVER] = "text"
    "Format of log lines on standard error: plain text, or one JSON object per line."
    otlp_endpoint: Annotated[str | None, RARE_SERVER] = None
    """OpenTelemetry collector to send traces to over HTTP, such as http://localhost:4318/v1/traces. Needs
    longhelix[trace]. [default: no traces]"""
    default_chat_template_kwargs: Annotated[str | None, RARE_SERVER] = None
    """Default variables for the chat template, as a JSON object such as '{"enable_thinking": false}'. Requests can
    override them with chat_template_kwargs."""

    def check(self) -> None:
        """Raise UserError if a value is out of range."""
        whole("max_waiting_requests", self.max_waiting_requests, 1, 2**31 - 1)
        whole("max_waiting_tokens", self.max_waiting_tokens, 1, 2**62)
        whole("max_restarts", self.max_restarts, 0, 10**6)
        whole("max_replays", self.max_replays, 0, 10**6)
        seconds("drain", self.drain)
        if self.max_body_bytes is not None:
            whole("max_body_bytes", self.max_body_bytes, 1024, 2**40)
        self._template_variables()

    def keys(self) -> tuple[str, ...]:
        """Return the API keys of the file and of the environment. Raises UserError."""
        path = self.api_key_file
        lines = read_text(path).splitlines() if path is not None else []
        keys = [line.strip() for line in (*lines, os.environ.get(_KEY_VARIABLE, "")) if line.strip()]
        if path is not None and not keys:
            raise UserError(
                f"--api-key-file {path} contains no keys: write one key per line, or leave out --api-key-file"
            )
        wrong = next((key for key in keys if not key.isascii() or " " in key), None)
        if wrong is not None:
            raise UserError(
                "an API key contains a space or a non-ASCII character, which HTTP headers cannot carry: choose another "
                "key"
            )
        return tuple(keys)

    def log(self) -> ServerLog:
        """Start the log."""
        return ServerLog(as_json=self.log_format == "json")

    @contextlib.contextmanager
    def start(self, model: ModelOptions, engine: EngineFlags, log: ServerLog) -> Iterator["Serving"]:
        """Return a context manager that starts the engine and the state of the server.

        Raises:
            UserError: the options are invalid, or do not fit the model or the machine.
        """
        from longhelix.engine.workers import torchrun
        from longhelix.serve.driver import Driver, Limits  # imported here because it loads the HTTP stack
        from longhelix.serve.engine_thread import Recovery
        from longhelix.serve.serving import Serving
        from longhelix.serve.traces import Traces

        self.check()
        name = self.served_model_name or (model.model if HubModel.of(model.model) else Path(model.model).name)
        traces = None if self.otlp_endpoint is None else Traces(self.otlp_endpoint, name)
        log.write("start", version=importlib.metadata.version("longhelix"), model=name, process_id=os.getpid())
        model = model.found(partial(log.write, "download"))
        with model.start(engine, partial(_log_layout, log), _DEFAULTS) as llm:
            limits = Limits(self.max_waiting_requests, self.max_waiting_tokens)
            yield Serving(
                llm,
                Driver(llm, limits, Recovery(0 if torchrun.is_active() else self.max_restarts, self.max_replays)),
                name,
                int(time.time()),
                metrics_prefix=self.metrics_prefix,
                reasoning_parser=self.reasoning_parser,
                log=log,
                traces=traces,
                chat_template_kwargs=self._template_variables(),
                sampling_defaults=llm.sampling_defaults() if self.generation_config == "auto" else {},
            )
        if traces is not None:
            traces.close()

    def admission(self, serving: "Serving", keys: tuple[str, ...], is_loopback: bool) -> "AccessControl":
        """Return the rules for who may use the server and how much they may send."""
        from longhelix.serve.gate import AccessControl

        config = serving.llm.config
        image_bytes = _IMAGE_BYTES if config.spec.vision is not None else 0
        most_bytes = self.max_body_bytes or 1_000_000 + 16 * config.scheduler.max_model_len + image_bytes
        return AccessControl(keys, most_bytes, is_loopback)

    def _template_variables(self) -> dict[str, Any]:
        from longhelix.engine.text.chat_template import checked_variables

        if self.default_chat_template_kwargs is None:
            return {}
        example = '{"enable_thinking": false}'
        return checked_variables(
            parsed_object("default_chat_template_kwargs", self.default_chat_template_kwargs, example)
        )


def serve(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    server: ServerOptions = ServerOptions(),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until SIGTERM or Ctrl-C.

    Parameters
    ----------
    host
        Address to listen on. Any address other than loopback requires an API key or --allow-without-key.
    port
        Port to listen on. 0 picks any free port.
    """
    from longhelix.serve.server import Address, run  # imported here because it loads the HTTP stack

    keys = server.keys()
    address = Address(host, whole("port", port, 0, 65535), seconds("drain", server.drain))
    address.check(bool(keys), given(engine).get("allow_without_key", False))
    with contextlib.closing(server.log()) as log, log.captures_logs():
        with server.start(model, engine, log) as serving:
            run(
                serving,
                server.admission(serving, keys, address.is_loopback),
                address,
                lambda url: log.write("ready", f"serving {serving.model} at {url}", model=serving.model, url=url),
            )
        log.write("end", steps=serving.driver.steps)


def _log_layout(log: ServerLog, config: EngineConfig) -> None:
    """Log the resolved layout and the size of the KV cache."""
    layout, tokens, most = config.layout, held_tokens(config), config.scheduler.max_model_len
    degrees = {name: getattr(layout, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
    about_layout, about_cache, *about_windows = describe(config)
    log.write("layout", about_layout, **degrees)
    log.write(
        "kv_cache",
        about_cache,
        held_tokens=tokens,
        max_model_len=most,
        max_concurrency=tokens / most,
    )
    for about, window in zip(about_windows, config.scheduler.cache.windows, strict=True):
        seen = window.visibility
        log.write(
            "kv_window",
            about,
            window_tokens=seen.window_tokens,
            chunk_tokens=seen.chunk_tokens,
            blocks_per_rank=window.num_blocks,
        )
