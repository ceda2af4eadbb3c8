"""Phases: named parts of loading, with seconds, told as they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvarto.core.clock import Clock


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
