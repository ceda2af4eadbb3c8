"""One engine process: started, spoken to in frames over a socket pair that it inherits, and ended.

Knows how to talk, not what is said: requests, restarts and strikes are the client's. The child leads its own process
group, so that Ctrl-C in a terminal reaches the server alone, which drains first.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from kvarto.core.errors import EngineDied, EngineError
from kvarto.engine.config import EngineConfig
from kvarto.engine.frames import HEADER_BYTES, decode_from_engine, encode_frame, frame_length
from kvarto.engine.messages import FromEngine, Shutdown, ToEngine

ENGINE_COMMAND = (sys.executable, "-m", "kvarto.engine.process")
_EXIT_GRACE_S = 5.0


class EngineKilled(EngineDied):
    """The process was ended by a SIGKILL that was not ours."""


class EngineChild:
    """A running engine process and our end of the socket pair."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._is_killed_by_us = False

    @classmethod
    async def start(cls, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> EngineChild:
        """Start `command --fd N` and send it `config`. Loading has only begun when this returns."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EngineDied(f"the engine process could not be started: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        child = cls(process, reader, writer)
        child._write(config)
        return child

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDied, saying how it ended, once the process is gone or talks nonsense."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER_BYTES))
            return decode_from_engine(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._death() from None
        except EngineError as error:
            raise EngineDied(str(error)) from error

    def send(self, message: ToEngine) -> None:
        """Queue a message; a dead engine is noticed by `receive`."""
        self._write(message)

    def kill(self) -> None:
        """End it now, without asking."""
        if self._process.returncode is None:
            self._is_killed_by_us = True
            self._process.kill()

    async def close(self) -> None:
        """Ask it to end, insist after a few seconds, and release the socket."""
        self._write(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._writer.close()

    async def reap(self) -> None:
        """After a death: make sure that the process is gone and release the socket."""
        self.kill()
        await self._process.wait()
        self._writer.close()

    def _write(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def _death(self) -> EngineDied:
        """How the process ended. Its socket may close a moment before it can be reaped."""
        try:
            code = await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S)
        except TimeoutError:
            return EngineDied("the engine process closed its connection but still runs")
        if code >= 0:
            return EngineDied(f"the engine process ended with exit code {code}")
        kind = EngineKilled if -code == signal.SIGKILL and not self._is_killed_by_us else EngineDied
        return kind(f"the engine process was killed by {_signal_name(-code)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
