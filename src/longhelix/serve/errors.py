"""Errors in OpenAI's form: one sentence, and a code that stays."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from longhelix.errors import EngineError, PassingError, RequestError, UserError
from longhelix.serve.answers import FailureReason
from longhelix.serve.bodies import Ended, ScoredBody
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
_LONGEST_QUOTE = 200  # of what a client sent, in a message
_STATUSES = {  # of codes; of others 400
    "model_not_found": 404,
    "unknown_context": 404,
    "context_exists": 409,
    "invalid_checkpoint": 500,
    "missing_extra": 500,
    "disk_error": 500,
    "disk_full": 507,
}
# What a client reads in place of sentences that name the server's options, packages or files; and the field it is of.
_IN_CLIENTS_WORDS: dict[str, tuple[str, str | None]] = {
    "context_length_exceeded": (
        "the prompt, its images and the new tokens are more than the model's context has: give fewer or smaller "
        "images, shorten the prompt, or ask for fewer tokens",
        None,
    ),
    "kv_cache_exceeded": (
        "the prompt and the new tokens, or the context before them, need more of the KV cache than there is: shorten "
        "the prompt, ask for fewer tokens, or come again when fewer requests run",
        None,
    ),
    "no_chat_template": ("the model has no chat template: ask /v1/completions", "messages"),
    "missing_extra": ("this server lacks the packages that read images: give text alone", "messages"),
    "unsupported_model": ("the model does not take images: send text only", "messages"),
    "invalid_checkpoint": ("the model's files on the server are damaged, or lack what this needs", None),
    "unknown_context": (
        "there is no context of that name, or it is not ready: GET /v1/contexts says which are there",
        "context",
    ),
    "context_exists": (
        "there is a context of that name: choose another id, give replace, or delete it",
        "id",
    ),
    "context_mismatch": (
        "the context was saved by another model, or with other settings or another length than this: save it again, or "
        "leave it out",
        "context",
    ),
    "invalid_context": ("the context's files are damaged: delete it, and save it again", "context"),
    "disk_full": ("the server's disk is full, or files there may not be that large: delete contexts", None),
    "disk_error": ("the server's disk does not serve: whoever runs the server can say why", None),
}
NO_TOOLS = "the model's chat template takes no tools, or in a form that is not known"
# How the engine's other sentences begin, by the field that they are about.
_BEGINNINGS = {
    "max_new_tokens": "max_tokens",
    "stop token": "stop_token_ids",
    "a stop token": "stop_token_ids",
    "a stop string": "stop",
    "a token id of logit_bias": "logit_bias",
    "prompt token": "prompt",
    "every token": "stop_token_ids",
} | {name: name for name in (*ScoredBody.model_fields, *Ended.model_fields)}
_ABOUT = re.compile("([a-z_]+) (?:is|has) ")  # how a sentence about one field begins
_AT = re.compile(r"(messages|input)\[\d+\][\w.\[\]]*: ")  # and one about a part of a message
logger = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client has gone."""


class ClientError(UserError):
    """What is wrong with a request, in its client's words. param: the field that it is about."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_argument") -> None:
        super().__init__(message, code)
        self.param = param


class InvalidBodyError(HTTPException):
    """A body whose JSON is not what its route takes."""

    def __init__(self, error: ValidationError, body: object) -> None:
        super().__init__(400)
        found = error.errors(include_url=False, include_input=False)
        self.reason = RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in found], body=body)


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str


class Refusal(BaseModel):
    error: Problem


def refusal(status: int, message: str, code: str = "", param: str | None = None) -> JSONResponse:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    # Half a surrogate pair, which a message may quote, is no UTF-8.
    message = message.encode(errors="replace").decode()
    problem = Problem(message=message, type=kind, param=param, code=code or _CODES.get(status, "invalid_argument"))
    call = current()
    if call is not None:
        call.code = problem.code
    # A client that cannot be served now may come again.
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(Refusal(error=problem).model_dump(), status, headers)


def of_error(error: Exception) -> JSONResponse:
    """What an error is to a client."""
    return refusal(*_told(error))


def reason(error: Exception) -> FailureReason:
    """The same, where it is what something on the server has come to."""
    _, message, code, _ = _told(error)
    return FailureReason(message=message.encode(errors="replace").decode(), code=code)


def _told(error: Exception) -> tuple[int, str, str, str | None]:
    """Status, message, code, and the field that it is about."""
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
            # Its words may name paths, processes and memory; whoever runs the server is told them when it fails.
            return 503, "the engine has failed: see the server's log for the reason", error.code, None
        case DisconnectedError():
            return 499, "the client has disconnected", "disconnected", None
        case PassingError():
            return 503, f"{error}: try again later", error.code, None
        case RequestError():
            # It would fail again. Clients send again what got 500, and a request that ends ranks does so each time.
            return 422, str(error), error.code, None
        case _:
            logger.error("a request failed", exc_info=error)
            return 500, "the server has failed in this request: its log says why", "internal_error", None


def _in_clients_words(error: UserError) -> tuple[str, str, str | None]:
    """Message, code, and the field that it is about."""
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
    return said.replace("max_new_tokens", "the most new tokens"), error.code, param


def statuses(*more: int) -> dict[int | str, dict[str, Any]]:
    """Those of every route, and `more`, for OpenAPI."""
    return {status: {"model": Refusal} for status in (400, 401, 403, 405, 408, 413, *more)}


def event_stream(data: dict[str, Any]) -> dict[str, Any]:
    """Content of server-sent events, for OpenAPI. data: what each has, beside that it is text. OpenAPI 3.1 has no word
    for one of them; `itemSchema` is that of 3.2, which FastAPI writes as well."""
    fields = {"data": {"type": "string"} | data, "event": {"type": "string"}}
    return {"text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": fields}}}


def streamed() -> dict[int | str, dict[str, Any]]:
    """That the answer may be a stream, for OpenAPI."""
    return {200: {"content": event_stream({"description": "where stream is set: JSON, or [DONE] at the end"})}}


def install(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> JSONResponse:
        return of_error(error)

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
    """The methods that a path has, each of which is a route of its own. of_route: those of the first."""
    path = getattr(request.scope.get("route"), "path_format", "")
    documented = {method.upper() for method in app.openapi()["paths"].get(path, ())}
    return ", ".join(sorted(documented.union(filter(None, of_route.split(", ")))))


def _first(error: RequestValidationError) -> tuple[str, str, str | None]:
    """The first thing that is wrong: message, code, the field that has it.

    A field that takes several forms has an error for each of them. The one of the form that was meant says most.
    """
    of_field = [each for each in error.errors() if each["loc"][:2] == error.errors()[0]["loc"][:2]]
    found = max(of_field, key=lambda each: _meant(error.body, each))
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found['ctx']['error']}", "invalid_json", None
    if found["type"] == "model_attributes_type" and len(found["loc"]) == 1:
        return "the body is no JSON object: send one, with content-type: application/json", "invalid_json", None
    path, said = (
        _path(error.body, found["loc"][1:], found["type"] == "missing"),
        found["msg"].removeprefix("Value error, "),
    )
    if not path and (about := _ABOUT.match(said)):  # of the body as a whole
        return said[:_LONGEST_QUOTE], "invalid_argument", about.group(1)
    return f"{path or 'the body'}: {said[:_LONGEST_QUOTE]}", "invalid_argument", re.split(r"[.\[]", path)[0] or None


def _meant(body: object, found: Mapping[str, Any]) -> tuple[bool, int]:
    """How likely an error is of the form that a client meant: it has the right type, or is about a part of it."""
    return not found["type"].endswith("_type"), _path(body, found["loc"][1:], False).count("[")


def _path(body: object, location: Sequence[int | str], is_missing: bool) -> str:
    """A place in a body, such as messages[0].content, as its client wrote it: pydantic's has names of its own among
    those of fields, such as the one of several forms that it has tried. is_missing: there is nothing at that place."""
    path, inside = "", body
    for left, name in zip(range(len(location) - 1, -1, -1), location, strict=True):
        if isinstance(name, int) and isinstance(inside, list) and name < len(inside):
            path, inside = f"{path}[{name}]", inside[name]
        elif isinstance(inside, dict) and (name in inside or (is_missing and left == 0)):
            path, inside = f"{path}.{name}".removeprefix("."), inside.get(name)
    return path[:_LONGEST_QUOTE]
