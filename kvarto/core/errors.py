"""Every error that Kvarto raises on purpose. Whether to retry is in the type; what would work is in the message.

KvartoError
├── UsageError              a flag or a combination of flags cannot work; exit code 2
├── UnsupportedModel        the architecture, or one of its settings, is not built in
├── BadFile                 a file is truncated, lies about itself, or is not what it should be
├── AdapterError            an adapter cannot be served; nothing else is hurt
│   ├── BadAdapter          its files are broken, or contradict themselves; also a BadFile
│   ├── UnsupportedAdapter  a valid adapter of a kind that is not built in
│   └── AdapterMismatch     made for another base model
├── MemoryLimitError
│   ├── BudgetTooSmall      the plan does not fit; nothing was allocated
│   └── OutOfPages          the pool cannot serve a request now; freeing or reclaiming may help
├── RequestError            the client's request is wrong or cannot be served; carries an HTTP status
│   ├── InvalidRequest      400
│   ├── ContextLengthExceeded   400, `context_length_exceeded`
│   ├── NotFound            404
│   │   └── UnknownAdapter  no adapter of that name
│   ├── AdapterRefused      400, an adapter cannot be loaded, or never beside this request
│   ├── Overloaded          429, with `retry_after_s`
│   └── Unavailable         503
└── EngineError
    ├── EngineDied          the engine process is gone; the client may start a fresh one
    └── TransferFailed      a copy failed, timed out or was cancelled; its target holds nothing
"""

from __future__ import annotations


class KvartoError(Exception):
    """Base of all errors raised on purpose."""


class UsageError(KvartoError):
    """A flag, or a combination of flags, cannot work."""


class UnsupportedModel(KvartoError):
    """The model's architecture, or one of its settings, is not built in. Raised before anything is loaded."""


class BadFile(KvartoError):
    """A file is truncated, lies about itself, or is not what its name says. Names the file and the field."""


class AdapterError(KvartoError):
    """An adapter cannot be served. Says which key or tensor, why, and what would work."""


class BadAdapter(AdapterError, BadFile):
    """The adapter's files are broken, contradict themselves, or lie outside the folders that were named."""


class UnsupportedAdapter(AdapterError):
    """The adapter is valid and of a kind, or with a setting, that is not built in."""


class AdapterMismatch(AdapterError):
    """The adapter was made for another base model: a module or a size does not fit."""


class MemoryLimitError(KvartoError):
    """Something does not fit into the budget."""


class BudgetTooSmall(MemoryLimitError):
    """The plan does not fit into the budget. Raised before anything is allocated."""


class OutOfPages(MemoryLimitError):
    """The pool cannot serve a request now; freeing or reclaiming pages may help."""


class RequestError(KvartoError):
    """A request is wrong or cannot be served. `param` names the field, `code` is for programs."""

    status = 400
    code: str | None = None
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field has a wrong type or a value outside its limits."""


class ContextLengthExceeded(RequestError):
    """Prompt and output do not fit into the model's context, or could never fit into the page pool."""

    code = "context_length_exceeded"


class NotFound(RequestError):
    """No such model."""

    status = 404
    code = "model_not_found"


class UnknownAdapter(NotFound):
    """No adapter of that name is registered."""


class AdapterRefused(RequestError):
    """The adapter's files are refused, or it can never be on the device beside this request."""

    code = "adapter_refused"


class Overloaded(RequestError):
    """The queue is full, as a whole or for one adapter; retry after `retry_after_s` seconds."""

    status = 429
    code = "queue_full"
    kind = "rate_limit_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """The server is starting, draining or broken."""

    status = 503
    code = "unavailable"
    kind = "server_error"


class EngineError(KvartoError):
    """The engine failed; the request is not at fault."""


class EngineDied(EngineError):
    """The engine process is gone."""


class TransferFailed(EngineError):
    """A copy failed, timed out or was cancelled; its target holds nothing."""
