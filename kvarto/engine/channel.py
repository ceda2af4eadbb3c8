"""Channel: how an engine loop hears and answers. One in memory for in-process use and tests, one over a socket.

A reader thread takes frames off the socket, so that the loop can compute and still find everything that came. The end
of the stream means that the server is gone, and an engine without a server has no purpose: the process ends at once,
also in the middle of a step.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Protocol

from kvarto.core.errors import EngineError
from kvarto.engine.config import EngineConfig
from kvarto.engine.frames import HEADER_BYTES, decode_config, decode_to_engine, encode_frame, frame_length
from kvarto.engine.messages import FromEngine, ToEngine

EXIT_ORPHANED = 3
"""Exit code when the server's end of the socket is closed."""
EXIT_MALFORMED = 4
"""Exit code after a frame that is no message."""
_LOCAL_PAUSE_S = 0.001


class Channel(Protocol):
    """Both directions between a client and the engine loop, seen from the loop."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All that came, in order; waits up to `timeout_s` seconds for the first."""
        ...

    def send(self, message: FromEngine) -> None:
        """Hand a message to the client."""
        ...


class LocalChannel:
    """A channel inside one process and one thread: put messages in, run the loop, take replies out."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.outbox: deque[FromEngine] = deque()

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All that was put into `inbox`. Nobody could add to it meanwhile, so this only gives way to copies."""
        if timeout_s > 0 and not self.inbox:
            time.sleep(min(timeout_s, _LOCAL_PAUSE_S))
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, message: FromEngine) -> None:
        """Append to `outbox`."""
        self.outbox.append(message)


class SocketChannel:
    """A channel over one end of a socket pair. Close by ending the process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived: SimpleQueue[ToEngine] = SimpleQueue()

    def read_config(self) -> EngineConfig:
        """The first frame. Raises EngineError when it is malformed or the stream ends."""
        return decode_config(_read_frame(self._connection))

    def start(self) -> None:
        """Begin to read messages in a thread of its own."""
        threading.Thread(target=self._read_for_ever, name="kvarto-channel", daemon=True).start()

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All that came; waits up to `timeout_s` seconds for the first."""
        messages: list[ToEngine] = []
        try:
            messages.append(self._arrived.get(timeout_s > 0, max(timeout_s, 0.0)))
            while True:
                messages.append(self._arrived.get_nowait())
        except Empty:
            return messages

    def send(self, message: FromEngine) -> None:
        """Write a frame; a server that is gone is noticed by the reading thread."""
        try:
            self._connection.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(EXIT_ORPHANED)

    def _read_for_ever(self) -> None:
        try:
            while True:
                self._arrived.put(decode_to_engine(_read_frame(self._connection)))
        except _EndOfStream:
            os._exit(EXIT_ORPHANED)
        except EngineError as error:
            print(f"kvarto engine: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_MALFORMED)


class _EndOfStream(EngineError):
    """The other end closed."""


def _read_frame(connection: socket.socket) -> bytearray:
    return _read_exactly(connection, frame_length(bytes(_read_exactly(connection, HEADER_BYTES))))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    filled = 0
    while filled < num_bytes:
        try:
            count = connection.recv_into(view[filled:])
        except ConnectionResetError:
            count = 0
        if count == 0:
            raise _EndOfStream(f"the stream ended after {filled} of {num_bytes} bytes")
        filled += count
    return data
