"""How a server ends, from the moment that it starts.

The first SIGTERM or SIGINT drains: `/readyz` turns red, new requests are refused with 503, running ones finish, and
the process ends with 0. A second one ends it at once; streams then close with an error. While it still loads, the
first one ends it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvarto.server.startup import Say

if TYPE_CHECKING:  # the HTTP stack is imported while the engine loads
    import uvicorn

    from kvarto.engine.client import EngineClient


class Ending:
    """Turns signals into the two ways to end. Takes them over when it is made, inside the event loop."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._asked = asyncio.Event()
        self._client: EngineClient | None = None
        self._http: uvicorn.Server | None = None
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take_signal)

    async def unless_asked(self, start: Coroutine[Any, Any, object]) -> bool:
        """Load; False when a signal came first."""
        loading = asyncio.create_task(start)
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if loading.done():
            loading.result()
            return True
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return False

    async def serve(self, client: EngineClient, http: uvicorn.Server, bound: socket.socket) -> None:
        """Answer HTTP until the end."""
        self._client, self._http = client, http
        if not self._asked.is_set():
            await http.serve(sockets=[bound])

    def _take_signal(self) -> None:
        if self._http is None or self._client is None:
            self._asked.set()
        elif self._draining is None:
            if self._client.num_open:
                self._say(f"finishing {self._client.num_open} requests; a second signal ends at once")
            self._draining = asyncio.ensure_future(self._drain(self._client, self._http))
        else:
            self._draining.cancel()
            self._http.should_exit = self._http.force_exit = True

    async def _drain(self, client: EngineClient, http: uvicorn.Server) -> None:
        await client.drain()
        http.should_exit = True
