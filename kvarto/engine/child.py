"""One engine process: started, spoken to in frames over a socket pair that it inherits, and ended.

Knows how to talk, not what is said: requests, restarts and strikes are the client's. The child leads its own process
group, so that Ctrl-C in a terminal reaches the server alone, which drains first.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvarto.core.errors import EngineDied, EngineError
from kvarto.engine.config import EngineConfig
from kvarto.engine.frames import FrameReader, decode_from_engine, encode_frame
from kvarto.engine.messages import FromEngine, Shutdown, ToEngine

ENGINE_COMMAND = (sys.executable, "-m", "kvarto.engine.process")
_EXIT_GRACE_S = 5.0


class EngineKilled(EngineDied):
    """The process was ended by a SIGKILL that was not ours."""


class _Inbox(asyncio.Protocol):
    """Cuts what the engine sends into messages, and hands each over as it arrives: no task is woken for it."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._kept: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self._take: Callable[[FromEngine], None] = self._keep
        self._ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def receive(self) -> FromEngine:
        """The next message. Raises what ended them, as `follow`."""
        while not self._kept:
            if self._ended.done():
                raise self._ended.result()
            self._news.clear()
            await self._news.wait()
        return self._kept.popleft()

    async def follow(self, take: Callable[[FromEngine], None]) -> Exception:
        """Call `take` for all further messages; give what ended them: EOFError, EngineDied after nonsense, or what
        `take` raised.
        """
        try:
            while self._kept:
                take(self._kept.popleft())
        except Exception as error:
            self._end(error)
        self._take = take
        return await self._ended

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._ended.done():
            return
        try:
            for message in self._messages(data):
                self._take(message)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._end(EOFError())

    def _messages(self, data: bytes) -> Iterator[FromEngine]:
        try:
            for body in self._frames.feed(data):
                yield decode_from_engine(body)
        except EngineError as error:
            raise EngineDied(str(error)) from error

    def _keep(self, message: FromEngine) -> None:
        self._kept.append(message)
        self._news.set()

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
        self._news.set()


class EngineChild:
    """A running engine process and our end of the socket pair."""

    def __init__(self, process: asyncio.subprocess.Process, inbox: _Inbox, transport: asyncio.Transport) -> None:
        self._process = process
        self._inbox = inbox
        self._transport = transport
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
        transport, inbox = await asyncio.get_running_loop().create_connection(_Inbox, sock=ours)
        child = cls(process, inbox, transport)
        child._write(config)
        return child

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDied, saying how it ended, once the process is gone or talks nonsense."""
        try:
            return await self._inbox.receive()
        except EOFError:
            raise await self._death() from None

    async def follow(self, take: Callable[[FromEngine], None]) -> EngineDied:
        """Call `take` for each further message, as it arrives, until the process is gone or talks nonsense; give its
        death. Raises what `take` raised, but for an EngineDied, which counts as nonsense.
        """
        error = await self._inbox.follow(take)
        if isinstance(error, EOFError):
            return await self._death()
        if isinstance(error, EngineDied):
            return error
        raise error

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
        self._transport.close()

    async def reap(self) -> None:
        """After a death: make sure that the process is gone and release the socket."""
        self.kill()
        await self._process.wait()
        self._transport.close()

    def _write(self, message: msgspec.Struct) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

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
