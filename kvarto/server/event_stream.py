"""Server-sent events, and requests whose client may leave: the two ways in which an answer goes out.

Both watch `receive` for the client's departure while they wait for tokens, so that a request that nobody waits for is
cancelled at once. Pure ASGI: a wrapped response would hide the departure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvarto.core.errors import KvartoError
from kvarto.server.errors import body_of, logger
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


class EventStream(Response):
    """A response that sends events as they come. `chunks` yields encoded events; `cancel` is called at the end."""

    def __init__(self, chunks: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks
        self._cancel = cancel
        self._sent_s = 0.0
        self._is_open = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end, the client leaves or the server stops."""
        sending = asyncio.ensure_future(self._send_all(send))
        pinging = asyncio.ensure_future(self._ping(send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._cancel()
            await _end(sending, pinging, gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_s = time.monotonic()
        async for data in self._events():
            self._sent_s = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_open = False
        await send({"type": "http.response.body", "body": b""})

    async def _ping(self, send: Send) -> None:
        """A timer of its own, so that a token costs no timer."""
        await asyncio.sleep(PING_S)
        while self._is_open:
            silent_s = time.monotonic() - self._sent_s
            if silent_s >= PING_S:
                self._sent_s, silent_s = time.monotonic(), 0.0
                await send({"type": "http.response.body", "body": PING, "more_body": True})
            await asyncio.sleep(PING_S - silent_s)

    async def _events(self) -> AsyncIterator[bytes]:
        """The events, or those before an error and then the error as one; a stream that failed has no [DONE]."""
        try:
            async for chunk in self._chunks:
                yield chunk
            yield DONE
        except KvartoError as error:
            yield event(ErrorAnswer(body_of(error)))
        except Exception as error:
            logger.error("unexpected error in a stream", exc_info=error)
            yield event(ErrorAnswer(body_of(error)))
