"""What happens around every request, as pure ASGI: ids, counts and keys.

A wrapper that buffers or re-creates responses would hide that a client has left; these only look at messages as they
pass.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarto.server.errors import Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/metrics"})
"""Paths that need no key: probes and scrapes have none. Everything else is closed, routes that do not exist too."""
SEND_CHUNK = "kvarto.send_chunk"
"""Key of the server's `send` in the scope."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class DirectBody:
    """Lets chunks of a stream go straight to the server. Stands outside of all others: they see the head of each answer
    and its end, but in between a chunk would pass half a dozen coroutines of which none looks at it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the server's own `send` into the scope."""
        await self._app({**scope, SEND_CHUNK: send}, receive, send)


class RequestId:
    """Gives every answer an X-Request-Id: the client's own when it is harmless. It never becomes a key of ours."""

    def __init__(self, app: ASGIApp, version: str) -> None:
        self._app = app
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _SAFE_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-kvarto-version"] = self._version
            await send(message)

        await self._app(scope, receive, send_with_id)


class RootPath:
    """Tells the application under which prefix a proxy publishes it; requests may come with the prefix or without."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set it for routing and for the OpenAPI file."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class Counted:
    """Counts answers by route, method and status."""

    def __init__(
        self, app: ASGIApp, answered: Callable[[str, str, int], None], paths: Collection[str], model_prefix: str
    ) -> None:
        self._app = app
        self._answered = answered
        self._paths = frozenset(paths)
        self._model_prefix = model_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the status as it passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(self._handler(scope["path"]), scope["method"], message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)

    def _handler(self, path: str) -> str:
        """The route's own path: labels must not grow with what clients invent."""
        if path in self._paths:
            return path
        return f"{self._model_prefix}{{id}}" if path.startswith(self._model_prefix) else "other"


class Keys:
    """Lets only requests with an accepted key pass, except to open paths. Decides on the path as it was sent."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = frozenset({*OPEN_PATHS, *(root_path.rstrip("/") + path for path in OPEN_PATHS)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without the key; websockets, which we do not have, are closed too."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = Unauthorized("this server needs an API key; send `Authorization: Bearer KEY`")
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        raw_path = scope.get("raw_path")
        path = scope["path"] if raw_path is None else raw_path.partition(b"?")[0].decode("latin-1")
        if scope["type"] == "http" and path in self._open:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = key.strip().encode("latin-1")  # the bytes as they were sent
        accepted = [hmac.compare_digest(offered, known) for known in self._keys]  # all of them: no early end
        return scheme.lower() == "bearer" and any(accepted)
