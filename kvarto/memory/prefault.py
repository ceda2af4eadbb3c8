"""Prefault: backs a range with memory in the background, because the first touch of a page is slow.

It changes no byte, so that it may run while others already write. Chunks are small, so that it stops quickly and a
lock limit of a few MiB suffices on kernels that need one.
"""

from __future__ import annotations

import threading

from kvarto.core.errors import MemoryLimitError
from kvarto.core.units import MIB
from kvarto.memory.system_memory import populate

CHUNK_BYTES = 4 * MIB


class Prefault:
    """One range being backed, from its start to its end, by one thread."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Starts at once. Both are multiples of the system's page."""
        self._address = address
        self._size_bytes = size_bytes
        self._done_bytes = 0
        self._error: MemoryLimitError | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvarto-prefault", daemon=True)
        self._thread.start()

    @property
    def done_bytes(self) -> int:
        """Bytes backed so far."""
        return self._done_bytes

    @property
    def is_done(self) -> bool:
        """The thread has ended: all is backed, it was stopped, or the system refused."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the thread has ended. Raises MemoryLimitError when the system refused."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End after the chunk at hand, and wait for that. What the system refused is not raised here."""
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while self._done_bytes < self._size_bytes and not self._is_stopping.is_set():
            chunk_bytes = min(CHUNK_BYTES, self._size_bytes - self._done_bytes)
            try:
                populate(self._address + self._done_bytes, chunk_bytes)
            except MemoryLimitError as error:
                self._error = error
                return
            self._done_bytes += chunk_bytes
