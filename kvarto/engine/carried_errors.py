"""Errors that cross from the engine to its client by name."""

from __future__ import annotations

from kvarto.core import errors
from kvarto.core.errors import EngineError, KvartoError, Overloaded, RequestError
from kvarto.engine.messages import Refused


def refused_by(request_id: str, error: KvartoError) -> Refused:
    """What the engine tells of an error that ends a request."""
    return Refused(
        request_id=request_id,
        error=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
        code=error.code if isinstance(error, RequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else None,
    )


def error_of(refused: Refused) -> KvartoError:
    """The same error again, on the other side."""
    error = error_from(refused.error, refused.message, refused.param)
    if isinstance(error, RequestError):
        error.code = refused.code
    if isinstance(error, Overloaded) and refused.retry_after_s is not None:
        error.retry_after_s = refused.retry_after_s
    return error


def error_from(name: str, message: str, param: str | None = None) -> KvartoError:
    """An error by the name of its class in `kvarto.core.errors`; EngineError for a name that is not there."""
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, KvartoError):
        return EngineError(message)
    if issubclass(kind, RequestError):
        return kind(message, param=param)
    return kind(message)
