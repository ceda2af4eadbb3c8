"""Pace: how fast things end, and from it when to try again. A plain window of moments; knows no clock."""

from __future__ import annotations

from collections import deque

_WINDOW = 64
"""Ends from which the pace is taken."""
MAX_RETRY_S = 60


class Pace:
    """Seconds from one end to the next."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_WINDOW)

    def note_end(self, now_s: float) -> None:
        """Something ended."""
        self._ends_s.append(now_s)

    def seconds_each(self, now_s: float, *, least: int = 2) -> float | None:
        """Since the oldest end that is remembered; None before there are `least`. Rises while nothing ends."""
        return (now_s - self._ends_s[0]) / len(self._ends_s) if len(self._ends_s) >= least else None

    def retry_after_s(self, count: int, now_s: float) -> int:
        """When `count` more should have ended: 1 to 60 seconds."""
        each_s = self.seconds_each(now_s)
        return 1 if each_s is None else bounded_retry_s(each_s * count)


def bounded_retry_s(seconds: float) -> int:
    """As a client is told: whole seconds, neither at once nor so late that it gives up."""
    return min(MAX_RETRY_S, max(1, round(seconds)))
