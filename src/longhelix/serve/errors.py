"""Error responses in OpenAI's format: a message for people and a stable error code for programs."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from longhelix.errors import EngineError, PassingError, RequestError, UserError
from longhelix.serve.answers import Answer, FailureReason
from longhelix.serve.bodies import PromptEndingBody, ScoredBody
from longhelix.serve.calls import current
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    422: "server_error",
    429: "rate_limit_error",
}
_CODES = {
    401: "invalid_api_key",
    403: "not_from_here",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
    429: "overloaded",
}
_LONGEST_QUOTE = 200  # maximum number of characters of a client's text that a message quotes
_STATUSES = {  # HTTP status by error code; all other codes use 400
    "model_not_found": 404,
    "unknown_context": 404,
    "context_exists": 409,
    "invalid_checkpoint": 500,
    "missing_extra": 500,
    "disk_error": 500,
    "disk_full": 507,
}
# Messages for clients, by error code, with the request field that each message is about. They replace the messages for
# operators, which name the server's options, packages or files.
_IN_CLIENTS_WORDS: dict[str, tuple[str, str | None]] = {
    "context_length_exceeded": (
        "the prompt, its images and the new tokens exceed the model's context length: give fewer or smaller images, "
        "shorten the prompt, or ask for fewer tokens",
        None,
    ),
    "kv_cache_exceeded": (
        "the prompt and the new tokens, or the context before them, do not fit into the KV cache: shorten the "
        "prompt, ask for fewer tokens, or try again when fewer requests are running",
        None,
    ),
    "no_chat_template": ("the model has no chat template: use /v1/completions", "messages"),
    "missing_extra": ("this server lacks the packages that read images: send text only", "messages"),
    "unsupported_model": ("the model does not take images: send text only", "messages"),
    "invalid_checkpoint": (
        "the model's files on the server are damaged or incomplete: ask the operator of the server",
        None,
    ),
    "unknown_context": (
        "there is no context with this name, or it is not ready: GET /v1/contexts lists the contexts",
        "context",
    ),
    "context_exists": (
        "a context with this name already exists: choose another id, set replace, or delete the context",
        "id",
    ),
    "context_mismatch": (
        "the context was saved with another model or other settings, or was replaced while the request waited: save "
        "it again, or leave it out",
        "context",
    ),
    "invalid_context": ("the context's files are damaged: delete the context and save it again", "context"),
    "disk_full": ("the server's disk is full, or the context exceeds the limit on file sizes: delete contexts", None),
    "disk_error": ("the server cannot access its contexts on disk: ask the operator of the server", None),
}
NO_TOOLS = "the model's chat template does not support tools, or uses an unknown format for them: leave out tools"
# The first words of other engine messages, and the request field that each message is about.
_BEGINNINGS = {
    "max_new_tokens": "max_tokens",
    "stop token": "stop_token_ids",
    "a stop token": "stop_token_ids",
    "a stop string": "stop",
    "a token id of logit_bias": "logit_bias",
    "prompt token": "prompt",
    "every token": "stop_token_ids",
} | {name: name for name in (*ScoredBody.model_fields, *PromptEndingBody.model_fields)}
_ABOUT = re.compile("([a-z_]+) (?:is|has) ")  # start of a message about a single field
_AT = re.compile(r"(messages|input)\[\d+\][\w.\[\]]*: ")  # start of an error about one part of a conversation message
logger = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client has disconnected."""


class ClientError(UserError):
    """Error in a request, with a message for the client.

    Args:
        message: what is wrong and how to correct it.
        param: the request field that is wrong.
        code: error code.
    """

    def __init__(self, message: str, param: str | None, code: str = "invalid_argument") -> None:
        super().__init__(message, code)
        self.param = param


class InvalidBodyError(HTTPException):
    """Body that does not match the schema of its route."""

    def __init__(self, error: ValidationError, body: object) -> None:
        super().__init__(400)
        found = error.errors(include_url=False, include_input=False)
        self.reason = RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in found], body=body)


class ErrorDetail(Answer):
    """Why a request failed."""

    message: str
    """Description of the error and how to correct it, for people."""
    type: str
    """OpenAI's type of the error."""
    param: str | None = None
    """Request field that caused the error."""
    code: str
    """Stable error code, for programs."""


class ErrorAnswer(Answer):
    """Body of every error response."""

    error: ErrorDetail


def refusal(status: int, message: str, code: str = "", param: str | None = None) -> JSONResponse:
    """Return an error response.

    Args:
        status: HTTP status.
        message: what is wrong and how to correct it.
        code: error code; the default depends on the status.
        param: the request field that is wrong.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    # The message may quote an unpaired surrogate, which UTF-8 cannot encode.
    message = message.encode(errors="replace").decode()
    problem = ErrorDetail(message=message, type=kind, param=param, code=code or _CODES.get(status, "invalid_argument"))
    call = current()
    if call is not None:
        call.code = problem.code
    # Tell clients to try again later.
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(ErrorAnswer(error=problem).model_dump(), status, headers)


def response_for(error: Exception) -> JSONResponse:
    """Return the response that reports an error to a client."""
    return refusal(*_described(error))


def reason(error: Exception) -> FailureReason:
    """Return the message and the code of an error, for a response object that reports its own failure."""
    _, message, code, _ = _described(error)
    return FailureReason(message=message.encode(errors="replace").decode(), code=code)


def _described(error: Exception) -> tuple[int, str, str, str | None]:
    """Return the HTTP status, message, code and request field of an error."""
    match error:
        case UserError():
            return _STATUSES.get(error.code, 400), *_in_clients_words(error)
        case OverloadedError():
            return 429, str(error), "overloaded", None
        case ShuttingDownError():
            return 503, str(error), "shutting_down", None
        case RestartingError():
            return 503, str(error), "restarting", None
        case EngineError():
            # The message may name paths and processes, so only the log shows it.
            return 503, "the engine has failed: see the server's log for the reason", error.code, None
        case DisconnectedError():
            return 499, "the client has disconnected", "disconnected", None
        case PassingError():
            return 503, f"{error}: try again later", error.code, None
        case RequestError():
            # Clients retry after a 500, and this request would make the ranks fail each time.
            return 422, str(error), error.code, None
        case _:
            logger.error("a request failed", exc_info=error)
            return 500, "the server failed on this request: see its log for the reason", "internal_error", None


def _in_clients_words(error: UserError) -> tuple[str, str, str | None]:
    """Return the message, code and request field of an error, in terms that a client understands."""
    if isinstance(error, ClientError):
        return str(error), error.code, error.param
    if error.code in _IN_CLIENTS_WORDS:
        message, param = _IN_CLIENTS_WORDS[error.code]
        logger.info("refused: %s", error)
        return message, error.code, param
    if error.code == "chat_template_failed" and error.__cause__ is not None:
        return (
            f"the model's chat template refuses these messages ({error.__cause__}): change them",
            error.code,
            "messages",
        )
    said = str(error)
    if place := _AT.match(said):
        return said, error.code, place.group(1)
    param = next(
        (field for begins, field in _BEGINNINGS.items() if said.startswith((f"{begins} ", f"{begins}:"))), None
    )
    return said.replace("max_new_tokens", "the maximum number of new tokens"), error.code, param


def statuses(*more: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for OpenAPI: the statuses that every route has, plus `more`."""
    return {status: {"model": ErrorAnswer} for status in (400, 401, 403, 405, 408, 413, *more)}


def event_stream(data: dict[str, Any]) -> dict[str, Any]:
    """Return the content type of server-sent events for OpenAPI.

    OpenAPI 3.1 cannot describe a single event. `itemSchema` comes from OpenAPI 3.2, and FastAPI writes it too.

    Args:
        data: schema of the `data` field, in addition to its type.
    """
    fields = {"data": {"type": "string"} | data, "event": {"type": "string"}}
    return {"text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": fields}}}


def streamed() -> dict[int | str, dict[str, Any]]:
    """Return the response of a route that may stream, for OpenAPI."""
    description = "if stream is true: JSON. Completions and chats send [DONE] after the last event"
    return {200: {"content": event_stream({"description": description})}}


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into error responses."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return response_for(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return refusal(400, *_first(error))

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = refusal(error.status_code, str(error.detail))
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["Allow"] = _allowed(app, request, answer.headers.get("Allow", ""))
        return answer

    async def invalid_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, InvalidBodyError)
        return refusal(400, *_first(error.reason))

    for kind in (
        UserError,
        OverloadedError,
        RestartingError,
        ShuttingDownError,
        EngineError,
        RequestError,
        DisconnectedError,
        Exception,
    ):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(InvalidBodyError, invalid_body)
    app.add_exception_handler(HTTPException, by_status)


def _allowed(app: FastAPI, request: Request, of_route: str) -> str:
    """Return the methods of a path for the Allow header.

    Args:
        app: the application.
        request: the request with the wrong method.
        of_route: methods of the first route with this path. Each method has a separate route.
    """
    path = getattr(request.scope.get("route"), "path_format", "")
    documented = {method.upper() for method in app.openapi()["paths"].get(path, ())}
    return ", ".join(sorted(documented.union(filter(None, of_route.split(", ")))))


def _first(error: RequestValidationError) -> tuple[str, str, str | None]:
    """Return the message, code and request field of the first error.

    If a field allows several types, pydantic reports an error for each type. This function chooses the error for the
    type that the client most likely meant.
    """
    of_field = [each for each in error.errors() if each["loc"][:2] == error.errors()[0]["loc"][:2]]
    found = max(of_field, key=lambda each: _meant(error.body, each))
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found['ctx']['error']}", "invalid_json", None
    if found["type"] == "model_attributes_type" and len(found["loc"]) == 1:
        return "the body is not a JSON object: send one, with content-type: application/json", "invalid_json", None
    path, said = (
        _path(error.body, found["loc"][1:], found["type"] == "missing"),
        found["msg"].removeprefix("Value error, "),
    )
    if not path and (about := _ABOUT.match(said)):  # the error is about the body as a whole
        return said[:_LONGEST_QUOTE], "invalid_argument", about.group(1)
    return f"{path or 'the body'}: {said[:_LONGEST_QUOTE]}", "invalid_argument", re.split(r"[.\[]", path)[0] or None


def _meant(body: object, found: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the sort key of one of pydantic's errors. The largest key is for the type that the client likely meant.

    A key is large if the value has the right type, or if the error is about an item deep inside the value.
    """
    return not found["type"].endswith("_type"), _path(body, found["loc"][1:], False).count("[")


def _path(body: object, location: Sequence[int | str], is_missing: bool) -> str:
    """Return the path of a value in a body, such as messages[0].content.

    Args:
        body: the parsed body.
        location: pydantic's location. It also contains names that are not in the body, such as names of union members.
        is_missing: whether the field at that path is missing.
    """
    path, inside = "", body
    for left, name in zip(range(len(location) - 1, -1, -1), location, strict=True):
        if isinstance(name, int) and isinstance(inside, list) and name < len(inside):
            path, inside = f"{path}[{name}]", inside[name]
        elif isinstance(inside, dict) and (name in inside or (is_missing and left == 0)):
            path, inside = f"{path}.{name}".removeprefix("."), inside.get(name)
    return path[:_LONGEST_QUOTE]
