"""Server-sent events, and requests whose client may leave: the two ways in which an answer goes out.

Both watch `receive` for the client's departure while they wait for tokens, so that a request that nobody waits for is
cancelled at once. Pure ASGI: a wrapped response would hide the departure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarto.core.errors import KvartoError
from kvarto.server.errors import body_of, logger
from kvarto.server.middleware import SEND_CHUNK
from kvarto.server.outlet import Outlet
from kvarto.server.protocol import ErrorAnswer

PING_S = 15.0
"""A comment keeps proxies from closing a silent stream."""
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(message: msgspec.Struct) -> bytes:
    """One message as an event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`; None, with the work cancelled, when the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await _end(task, gone)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Events(Protocol):
    """Where a stream's events come from."""

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` from now on when there may be something to take, or nothing more comes."""

    def take(self) -> tuple[bytes, bool]:
        """The events that came since the last call, joined, and whether nothing more comes."""

    def tail(self) -> bytes:
        """What follows the last of them. Raises the error that ended them early."""


class EventStream(Response):
    """A response that sends events as they come; what came together goes out together. `cancel` is called at the end.

    The head and the end of the body pass all that stands around the application; chunks between them go straight to
    the server (`middleware.DirectBody`).
    """

    def __init__(self, events: Events, cancel: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._cancel = cancel
        self._sent_s = 0.0
        self._is_open = True
        self._ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """With the last part of the body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end, the client leaves or the server stops."""
        send_chunk: Send = scope.get(SEND_CHUNK, send)
        self._outlet = Outlet(send_chunk, self._pour)
        sending = asyncio.ensure_future(self._send_all(send))
        pinging = asyncio.ensure_future(self._ping(send_chunk))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._cancel()
            self._outlet.close()
            await _end(sending, pinging, gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._events.listen(self._pour)
        self._pour()
        last = await self._ended
        self._is_open = False
        await send({"type": "http.response.body", "body": last})

    def _pour(self) -> None:
        """Send what has come, unless an earlier part still waits for the reader: then its end calls again."""
        if self._ended.done() or not self._outlet.is_free:
            return
        data, tail = self._take()
        try:
            if tail is not None:
                self._ended.set_result(data + tail)
            elif data:
                self._sent_s = time.monotonic()
                self._outlet.write(data)
        except Exception as error:
            self._ended.set_exception(error)

    def _take(self) -> tuple[bytes, bytes | None]:
        """Events that came, and what ends the stream: [DONE], or an error as an event; None while it goes on."""
        data = b""
        try:
            data, are_over = self._events.take()
            return data, self._events.tail() + DONE if are_over else None
        except Exception as error:
            if not isinstance(error, KvartoError):
                logger.error("unexpected error in a stream", exc_info=error)
            return data, event(ErrorAnswer(body_of(error)))

    async def _ping(self, send: Send) -> None:
        """A timer of its own, so that a token costs no timer."""
        await asyncio.sleep(PING_S)
        while self._is_open:
            silent_s = time.monotonic() - self._sent_s
            if silent_s >= PING_S:
                self._sent_s, silent_s = time.monotonic(), 0.0
                await send({"type": "http.response.body", "body": PING, "more_body": True})
            await asyncio.sleep(PING_S - silent_s)
