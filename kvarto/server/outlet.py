"""Chunks of a body, sent at once: no task is woken for a chunk while its client reads.

An ASGI `send` is a coroutine because it may have to wait for the reader. It rarely does, and begun by hand it has then
ended within the call. When it waits, a task takes over what is left of it.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Generator
from typing import Any

from starlette.types import Send


class Outlet:
    """Sends chunk after chunk. One at a time may wait for the reader; write again when that is free."""

    def __init__(self, send: Send, on_free: Callable[[], None]) -> None:
        """`on_free` is called when a chunk has waited and is gone."""
        self._send = send
        self._on_free = on_free
        self.is_free = True
        """Does no chunk wait?"""
        self._waiting: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def write(self, data: bytes) -> None:
        """Send a chunk. Raises what sending it raised, or the one before."""
        assert self.is_free, "a chunk still waits"
        if self._error is not None:
            raise self._error
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            awaited = next(sending)
        except StopIteration:
            return
        self.is_free = False
        self._waiting = asyncio.ensure_future(_rest(sending, awaited))
        self._waiting.add_done_callback(self._end_of_waiting)

    def close(self) -> None:
        """Send nothing more, nor what waits."""
        if self._waiting is not None:
            self._waiting.cancel()

    def _end_of_waiting(self, waiting: asyncio.Future[None]) -> None:
        if not waiting.cancelled():
            self.is_free = True
            self._error = waiting.exception()
            self._on_free()


@types.coroutine
def _rest(begun: Generator[Any, None, None], awaited: Any) -> Generator[Any, None, None]:
    """What is left of a coroutine that was begun by hand and waits for `awaited`."""
    try:
        yield awaited
    except BaseException:
        begun.close()
        raise
    yield from begun
