"""Errors in OpenAI's form: one sentence, and a code that stays."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from longhelix.errors import EngineError, RequestError, UserError
from longhelix.serve.calls import current
from longhelix.serve.driver import OverloadedError, ShuttingDownError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_LONGEST_QUOTE = 200  # of what a client sent, in a message
logger = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client has gone."""


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
    match error:
        case UserError():
            status = 404 if error.code == "model_not_found" else 400
            return refusal(status, str(error), error.code)
        case OverloadedError():
            return refusal(429, str(error), "overloaded")
        case ShuttingDownError():
            return refusal(503, str(error), "shutting_down")
        case EngineError():
            return refusal(503, f"the engine has failed: {error}", error.code)
        case DisconnectedError():
            return refusal(499, "the client has gone", "disconnected")
        case RequestError():
            return refusal(500, str(error), error.code)
        case _:
            logger.error("a request failed", exc_info=error)
            return refusal(500, "the server has failed in this request: its log says why", "internal_error")


def statuses(*more: int) -> dict[int | str, dict[str, Any]]:
    """Those of every route, and `more`, for OpenAPI."""
    return {status: {"model": Refusal} for status in (400, 401, 413, *more)}


def install(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> JSONResponse:
        return of_error(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return refusal(400, *_first(error))

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return refusal(error.status_code, str(error.detail))

    for kind in (
        UserError,
        OverloadedError,
        ShuttingDownError,
        EngineError,
        RequestError,
        DisconnectedError,
        Exception,
    ):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_status)


def _first(error: RequestValidationError) -> tuple[str, str, str | None]:
    """The first thing that is wrong: message, code, the field that has it."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return f"the body is not JSON: {found['ctx']['error']}", "invalid_json", None
    names = [str(name) for name in found["loc"][1:] if not str(name).startswith(("function-", "constrained-"))]
    field, said = ".".join(names) or "the body", found["msg"].removeprefix("Value error, ")
    return f"{field[:_LONGEST_QUOTE]}: {said[:_LONGEST_QUOTE]}", "invalid_argument", names[0] if names else None
