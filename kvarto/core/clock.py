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
