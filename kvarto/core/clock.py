"""Time as an argument: whatever waits or times out is given its clock, so that a simulator can own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()


class VirtualClock:
    """Time that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, f"time does not run back by {-seconds} s"
        self._now_s += seconds
