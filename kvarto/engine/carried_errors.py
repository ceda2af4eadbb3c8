"""Errors that cross from the engine to its client by name."""

from __future__ import annotations

from kvarto.core import errors
from kvarto.core.errors import EngineError, KvartoError, Overloaded, RequestError


def error_from(name: str, message: str, param: str | None = None) -> KvartoError:
    """An error by the name of its class in `kvarto.core.errors`; EngineError for a name that is not there."""
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, KvartoError):
        return EngineError(message)
    if issubclass(kind, RequestError) and not issubclass(kind, Overloaded):
        return kind(message, param=param)
    return kind(message)
