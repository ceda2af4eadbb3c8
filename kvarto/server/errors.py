"""Errors as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvarto.core.errors import EngineDied, KvartoError, Overloaded, RequestError, Unavailable
from kvarto.server.protocol import ErrorAnswer, ErrorBody

logger = logging.getLogger("kvarto.server")

RETRY_UNAVAILABLE_S = 5
CLIENT_GONE = 499
"""Status, for our own counts, of an answer that nobody was there to receive."""


class BodyTooLarge(RequestError):
    """The body exceeds the limit."""

    status = 413
    code = "request_too_large"


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(RequestError):
    """Nobody may do this here."""

    status = 403
    code = "forbidden"
    kind = "permission_error"


class UnsupportedEncoding(RequestError):
    """The body is compressed."""

    status = 415
    code = "unsupported_encoding"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


def body_of(error: Exception) -> ErrorBody:
    """What a client is told. Nothing of an unexpected error gets out: its text may hold anything."""
    if isinstance(error, RequestError):
        return ErrorBody(message=str(error), type=error.kind, param=error.param, code=error.code)
    if isinstance(error, EngineDied):
        return ErrorBody(message=str(error), type="server_error", code="engine_died")
    if isinstance(error, KvartoError):
        return ErrorBody(message=str(error), type="server_error", code="engine_error")
    return ErrorBody(message="internal error; see the server's log", type="server_error", code="internal_error")


def status_of(error: Exception) -> int:
    """The HTTP status that goes with it."""
    return error.status if isinstance(error, RequestError) else HTTPStatus.INTERNAL_SERVER_ERROR


def error_response(error: Exception) -> Response:
    """The complete answer."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, Unavailable):
        headers["retry-after"] = str(RETRY_UNAVAILABLE_S)
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    content = msgspec.json.encode(ErrorAnswer(body_of(error)))
    return Response(content, status_code=status_of(error), headers=headers, media_type="application/json")


def install_handlers(app: FastAPI) -> None:
    """Give every error of the application this shape."""

    async def expected(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)  # it left before its body was here; nobody reads this

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error)
        return error_response(error)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _routing_error(error)

    app.add_exception_handler(KvartoError, expected)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, unexpected)


def _routing_error(error: HTTPException) -> Response:
    """No such path, or a method that it does not have."""
    allowed = (error.headers or {}).get("Allow")
    message = f"this path answers {allowed}" if allowed else "no such path; the API is under /v1, see /openapi.json"
    code = "method_not_allowed" if allowed else "not_found"
    body = ErrorBody(message=message, type="invalid_request_error", code=code)
    content = msgspec.json.encode(ErrorAnswer(body))
    headers = {"allow": allowed} if allowed else None
    return Response(content, status_code=error.status_code, headers=headers, media_type="application/json")
