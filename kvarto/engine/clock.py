"""Clock: the only source of time below the client, so that a simulation can hold it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; the wall clock may jump and is never read."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()
