"""Phases: named parts of loading, with seconds, told as they begin; and how far a long one is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvarto.core.clock import Clock

PROGRESS_EVERY_S = 0.25


class ByteCount:
    """Counts bytes towards a total, from several threads, and tells the fraction now and then."""

    def __init__(self, total_bytes: int, clock: Clock, on_progress: Callable[[float], None]) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._told_s = clock.now()

    def add(self, size_bytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self._done_bytes += size_bytes
            now_s = self._clock.now()
            if now_s - self._told_s >= PROGRESS_EVERY_S and self._total_bytes > 0:
                self._told_s = now_s
                self._on_progress(min(1.0, self._done_bytes / self._total_bytes))


class Phases:
    """A stopwatch with names."""

    def __init__(self, clock: Clock, on_phase: Callable[[str], None]) -> None:
        self._clock = clock
        self._on_phase = on_phase
        self._finished: list[tuple[str, float]] = []

    @property
    def finished(self) -> tuple[tuple[str, float], ...]:
        """Names and seconds, in order."""
        return tuple(self._finished)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside; a phase that raises is not recorded."""
        self._on_phase(name)
        start = self._clock.now()
        yield
        self._finished.append((name, self._clock.now() - start))
