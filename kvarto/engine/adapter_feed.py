"""AdapterFeed: the client's side of adapters. It asks, waits for answers, and tells a fresh engine what it must know.

What was loaded and unloaded at run time outlives engines: a fresh one hears of it before it hears of any request. Names
from folders and flags it knows itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from kvarto.core.errors import InvalidRequest, Unavailable
from kvarto.engine.adapter_settings import MAX_NAME_CHARS, is_name
from kvarto.engine.carried_errors import error_from
from kvarto.engine.messages import (
    AdapterAnswer,
    AdapterInfo,
    AdapterNames,
    ListAdapters,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)

ANSWER_LIMIT_S = 120.0
"""An engine answers between two steps, once files were opened; a fresh one loads its model first."""
Ask = LoadAdapter | UnloadAdapter | ListAdapters


class AdapterFeed:
    """Questions that wait for answers, by id."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.names: frozenset[str] = frozenset()
        """Registered now, as far as the engine has said."""
        self._send = send
        self._ids = count()
        self._asked: dict[str, tuple[Ask, asyncio.Future[AdapterAnswer]]] = {}
        self._changes: dict[str, str | None] = {}
        """Paths by name of what was loaded; None for what was unloaded."""

    async def load(self, name: str, path: Path) -> AdapterInfo:
        """Let `name` mean the adapter at `path`. Raises what the engine has against it, InvalidRequest, Unavailable."""
        if not is_name(name):
            raise InvalidRequest(
                f"`lora_name` must have 1 to {MAX_NAME_CHARS} printable characters and no comma", param="lora_name"
            )
        answer = await self._ask(LoadAdapter(request_id=self._next_id(), name=name, path=str(path)))
        self._changes[name] = str(path)
        return answer.adapters[0]

    async def unload(self, name: str) -> AdapterInfo:
        """Let `name` mean nothing. Raises UnknownAdapter, Unavailable."""
        answer = await self._ask(UnloadAdapter(request_id=self._next_id(), name=name))
        self._changes[name] = None
        return answer.adapters[0]

    async def list(self) -> tuple[AdapterInfo, ...]:
        """All names and where their bytes are. Raises Unavailable."""
        return (await self._ask(ListAdapters(request_id=self._next_id()))).adapters

    def take(self, message: AdapterAnswer | AdapterNames) -> None:
        """The engine said something."""
        if isinstance(message, AdapterNames):
            self.names = frozenset(message.names)
            return
        _, future = self._asked.get(message.request_id, (None, None))
        if future is not None and not future.done():
            future.set_result(message)

    def engine_took_over(self, names: Iterable[str]) -> None:
        """A fresh engine serves, and has these names. It hears what changed, then what was asked of the one before."""
        self.names = frozenset(names)
        for name, path in self._changes.items():
            if path is None:
                self._send(UnloadAdapter(request_id=self._next_id(), name=name))
            else:
                self._send(LoadAdapter(request_id=self._next_id(), name=name, path=path, is_known=True))
        for ask, _ in list(self._asked.values()):
            self._send(ask)

    async def _ask(self, ask: Ask) -> AdapterAnswer:
        future: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._asked[ask.request_id] = ask, future
        try:
            self._send(ask)
            async with asyncio.timeout(ANSWER_LIMIT_S):
                answer = await future
        except TimeoutError as error:
            raise Unavailable(f"the engine did not answer in {ANSWER_LIMIT_S:.0f} s; try again later") from error
        finally:
            del self._asked[ask.request_id]
        if answer.error is not None:
            raise error_from(answer.error, answer.message)
        return answer

    def _next_id(self) -> str:
        return f"adapters-{next(self._ids)}"
