"""One engine process after the other: started, listened to, watched, and replaced when it dies or falls silent.

What the messages mean, and what becomes of requests when an engine dies, is the client's business (`client.py`), which
is told through the four methods of `Listener`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvarto.core.errors import EngineDied, EngineError, KvartoError
from kvarto.engine.backoff import Backoff
from kvarto.engine.carried_errors import error_from
from kvarto.engine.child import ENGINE_COMMAND, EngineChild
from kvarto.engine.config import EngineConfig
from kvarto.engine.messages import (
    AdapterAnswer,
    AdapterNames,
    FromEngine,
    LoadFailed,
    Phase,
    Progress,
    Ready,
    Stats,
    StepOut,
    ToEngine,
)

logger = logging.getLogger("kvarto.engine")

MAX_FAILED_STARTS = 6
"""Starts in a row that may fail before engines are given up."""


class State(enum.Enum):
    """Of the engine, as clients of the server should see it."""

    LOADING = "loading"
    RUNNING = "running"
    RESTARTING = "restarting"
    BROKEN = "broken"
    CLOSED = "closed"


Said = StepOut | AdapterAnswer | AdapterNames | Stats
"""What an engine says while it serves."""


class Listener(Protocol):
    """Hears what engines say and what becomes of them. Called in the event loop; may not block."""

    def take(self, message: Said) -> None:
        """An engine that serves said something. Raises EngineDied for what no engine of ours would say."""

    def engine_died(self, death: EngineDied) -> None:
        """The engine is gone; another is about to be started."""

    def engine_took_over(self, before: Ready, now: Ready) -> None:
        """A fresh engine serves."""

    def gave_up(self, error: KvartoError) -> None:
        """No engine could be started again."""


Loading = Awaitable[tuple[EngineChild, Ready]]
"""What `load_engine` makes, perhaps as a task."""


async def load_engine(
    config: EngineConfig,
    command: Sequence[str] = ENGINE_COMMAND,
    on_phase: Callable[[str], None] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> tuple[EngineChild, Ready]:
    """Start an engine and wait for its Ready. Whatever goes wrong, no process is left behind.

    `on_phase` hears the names of phases as they begin, `on_progress` how far a long one is.

    Raises what the engine could not do, as its own KvartoError.
    """
    child = await EngineChild.start(config, command)
    try:
        while True:
            message = await child.receive()
            if isinstance(message, Phase) and on_phase is not None:
                on_phase(message.name)
            elif isinstance(message, Progress) and on_progress is not None:
                on_progress(message.fraction)
            elif isinstance(message, LoadFailed):
                raise error_from(message.error, message.message)
            elif isinstance(message, Ready):
                return child, message
    except BaseException:
        await child.reap()
        raise


class Supervisor:
    """Keeps an engine running. `start` first; `close` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        *,
        command: Sequence[str],
        silence_limit_s: float,
        on_phase: Callable[[str], None] | None,
    ) -> None:
        self.state = State.LOADING
        self.command = command
        self._config = config
        self._listener = listener
        self._silence_limit_s = silence_limit_s
        self._on_phase = on_phase
        self._backoff = Backoff()
        self._child: EngineChild | None = None
        self._ready: Ready | None = None
        self._started_s = 0.0
        self._heard_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, loading: Loading | None = None) -> Ready:
        """Start an engine, or take the one of `loading`, and wait until it serves. Raises what the engine could not
        do, as its own KvartoError.
        """
        child, self._ready = await (self._load() if loading is None else loading)
        self._serve_with(child)
        self._tasks = [asyncio.create_task(self._follow(child)), asyncio.create_task(self._watch())]
        return self._ready

    async def close(self) -> None:
        """End the engine, and start no other."""
        self.state = State.CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    @property
    def ready(self) -> Ready:
        """What the engine said about itself when it was loaded."""
        assert self._ready is not None, "start() has not returned"
        return self._ready

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def heard_s(self) -> float:
        """Monotonic time of the engine's last word."""
        return self._heard_s

    @property
    def is_alive(self) -> bool:
        """Does the engine make progress, or will another one soon?"""
        if self.state is State.RUNNING:
            return time.monotonic() - self._heard_s < self._silence_limit_s
        return self.state in (State.LOADING, State.RESTARTING)

    def send(self, message: ToEngine) -> None:
        """Say something to the engine that serves; nothing while there is none."""
        if self._child is not None:
            self._child.send(message)

    # --- engines come and go ----------------------------------------------------------------------------------------

    async def _load(self) -> tuple[EngineChild, Ready]:
        return await load_engine(self._config, self.command, self._on_phase)

    def _serve_with(self, child: EngineChild) -> None:
        self._child = child
        self._started_s = self._heard_s = time.monotonic()
        self.state = State.RUNNING

    async def _follow(self, child: EngineChild) -> None:
        """Follow one engine after the other until this is closed or engines are given up."""
        try:
            while True:
                death = await child.follow(self._hear)
                self._child = None
                self.state = State.RESTARTING
                await child.reap()
                self._listener.engine_died(death)
                child, ready = await self._restart()
                before, self._ready = self.ready, ready
                self._serve_with(child)
                self._listener.engine_took_over(before, ready)
        except KvartoError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the engine's client failed")
            self._give_up(EngineError(f"the engine's client failed: {type(error).__name__}"))

    def _hear(self, message: FromEngine) -> None:
        """Pass on what an engine says that serves. Raises EngineDied for what none of ours would say."""
        self._heard_s = time.monotonic()
        if not isinstance(message, Said):
            raise EngineDied(f"the engine sent `{type(message).__name__}` while it was serving")
        self._listener.take(message)

    async def _restart(self) -> tuple[EngineChild, Ready]:
        """A fresh engine, later while engines keep dying. Raises the last error after several failed starts."""
        lived_s = time.monotonic() - self._started_s
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            await asyncio.sleep(self._backoff.died(lived_s))
            try:
                return await self._load()
            except KvartoError as error:
                logger.error("start %d of %d of a fresh engine failed: %s", attempt, MAX_FAILED_STARTS, error)
                last, lived_s = error, 0.0
        raise last

    def _give_up(self, error: KvartoError) -> None:
        self.state = State.BROKEN
        logger.critical("giving up on engines: %s", error)
        if self._child is not None:
            self._child.kill()
        self._listener.gave_up(error)

    async def _watch(self) -> None:
        """Kill an engine that is silent for too long.

        Two looks must find the same silence: if this process itself was stopped, the first look only wakes it up and
        the frames that waited are read before the second.
        """
        suspected_s: float | None = None
        while True:
            await asyncio.sleep(self._silence_limit_s / 4)
            silent_s = time.monotonic() - self._heard_s
            is_silent = self.state is State.RUNNING and silent_s > self._silence_limit_s
            if is_silent and suspected_s == self._heard_s and self._child is not None:
                logger.error("the engine was silent for %.1f s and is replaced", silent_s)
                self._child.kill()
            suspected_s = self._heard_s if is_silent else None
