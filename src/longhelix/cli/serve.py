"""`longhelix serve`: a model for many clients, in OpenAI's HTTP interface."""

import contextlib
import importlib.metadata
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from longhelix.cli.options import EngineFlags, ModelOptions, describe, held_tokens, parsed_object
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag, Seconds, Size
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.text.reasoning import PARSERS
from longhelix.errors import UserError
from longhelix.serve.journal import Journal
from longhelix.values import seconds, whole

_KEY_VARIABLE = "LONGHELIX_API_KEY"
_BYTES_OF_IMAGES = 64_000_000  # of a body
# What one prompt wants and what many want differ.
_DEFAULTS = {"policy": "lars", "placement": "auto", "kv_cache_tokens": "auto"}


def serve(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_key_file: Path | None = None,
    allow_without_key: Flag = False,
    max_waiting_requests: int = 1024,
    max_waiting_tokens: Size = 64_000_000,
    max_body_bytes: Size | None = None,
    max_restarts: int = 3,
    max_replays: int = 1,
    drain: Annotated[Seconds, Parameter(show_default=False)] = 60.0,
    reasoning_parser: Literal[PARSERS] = "auto",
    metrics_prefix: str = "longhelix",
    log_format: Literal["text", "json"] = "text",
    otlp_endpoint: str | None = None,
    default_chat_template_kwargs: str | None = None,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    Parameters
    ----------
    host
        The address to listen at. One that others can reach wants API keys.
    port
        0: any that is free.
    served_model_name
        What clients call the model. [default: the end of --model]
    api_key_file
        A file of keys, a line each; clients send one as `Authorization: Bearer KEY`. The variable LONGHELIX_API_KEY has
        one more.
    allow_without_key
        Let others than this machine come without a key.
    max_waiting_requests
        So many requests may wait for their first token; more get status 429.
    max_waiting_tokens
        So many prompt tokens may wait, all requests together.
    max_body_bytes
        The largest body of a request. [default: 1 MB, and 16 bytes for each token of --max-model-len; 64 MB more where
        the model reads images]
    max_restarts
        So many times an hour an engine that fails starts again, and its requests go on.
    max_replays
        So many times a request that runs while the engine fails goes on; with one more it ends with an error. A new
        token since the engine began again makes it begin to count again.
    drain
        How long requests may take to end once the server is told to. [default: 60 s]
    reasoning_parser
        How the model writes its reasoning, which chats and responses then return apart from the content. auto looks at
        the chat template and the vocabulary; none leaves the reasoning in the content.
    metrics_prefix
        What the names at /metrics begin with: vllm for dashboards that were made for it.
    log_format
        Lines on standard error as text, or each as a JSON object.
    otlp_endpoint
        Where an OpenTelemetry collector takes traces over HTTP, such as http://localhost:4318/v1/traces; wants
        longhelix[trace]. [default: no traces]
    default_chat_template_kwargs
        Variables for the model's chat template, as a JSON object such as '{"enable_thinking": false}'. Requests may
        replace them with chat_template_kwargs.
    """
    from longhelix.engine.text.chat_template import checked_variables
    from longhelix.serve.driver import Driver, Limits  # loads what answers HTTP
    from longhelix.serve.engine_thread import Recovery
    from longhelix.serve.gate import AccessControl
    from longhelix.serve.server import Address, run
    from longhelix.serve.serving import Serving
    from longhelix.serve.traces import Traces

    keys = _keys(api_key_file)
    address = Address(host, whole("port", port, 0, 65535), seconds("drain", drain))
    address.check(bool(keys), allow_without_key)
    limits = Limits(
        whole("max_waiting_requests", max_waiting_requests, 1, 2**31 - 1),
        whole("max_waiting_tokens", max_waiting_tokens, 1, 2**62),
    )
    recovery = Recovery(whole("max_restarts", max_restarts, 0, 10**6), whole("max_replays", max_replays, 0, 10**6))
    if max_body_bytes is not None:
        max_body_bytes = whole("max_body_bytes", max_body_bytes, 1024, 2**40)
    name = served_model_name or Path(model.model).name
    variables: dict[str, Any] = {}
    if default_chat_template_kwargs is not None:
        example = '{"enable_thinking": false}'
        variables = checked_variables(
            parsed_object("default_chat_template_kwargs", default_chat_template_kwargs, example)
        )
    traces = None if otlp_endpoint is None else Traces(otlp_endpoint, name)
    with contextlib.closing(Journal(as_json=log_format == "json")) as journal, journal.has_logs():
        journal.tell("start", version=importlib.metadata.version("longhelix"), model=name, process_id=os.getpid())
        with model.start(engine, partial(_tell, journal), _DEFAULTS) as llm:
            of_images = _BYTES_OF_IMAGES if llm.config.spec.vision is not None else 0
            most_bytes = max_body_bytes or 1_000_000 + 16 * llm.config.scheduler.max_model_len + of_images
            driver = Driver(llm, limits, recovery)
            serving = Serving(
                llm,
                driver,
                name,
                int(time.time()),
                metrics_prefix=metrics_prefix,
                reasoning_parser=reasoning_parser,
                journal=journal,
                traces=traces,
                chat_template_kwargs=variables,
            )
            run(
                serving,
                AccessControl(keys, most_bytes, address.is_loopback),
                address,
                lambda url: journal.tell("ready", f"serving {name} at {url}", model=name, url=url),
            )
        if traces is not None:
            traces.close()
        journal.tell("end", steps=driver.steps)


def _tell(journal: Journal, config: EngineConfig) -> None:
    """What the engine resolved to."""
    layout, tokens, most = config.layout, held_tokens(config), config.scheduler.max_model_len
    degrees = {name: getattr(layout, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
    about_layout, about_cache = describe(config)
    journal.tell("layout", about_layout, **degrees)
    journal.tell(
        "kv_cache",
        about_cache,
        held_tokens=tokens,
        max_model_len=most,
        max_concurrency=tokens / most,
    )


def _keys(path: Path | None) -> tuple[str, ...]:
    lines = read_text(path).splitlines() if path is not None else []
    keys = [line.strip() for line in (*lines, os.environ.get(_KEY_VARIABLE, "")) if line.strip()]
    if path is not None and not keys:
        raise UserError(f"{path} has no key: write one to a line, or leave out --api-key-file")
    wrong = next((key for key in keys if not key.isascii() or " " in key), None)
    if wrong is not None:
        raise UserError("an API key has a space or a character that is not ASCII: headers cannot carry it")
    return tuple(keys)
