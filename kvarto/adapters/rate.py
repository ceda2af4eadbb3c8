"""Rate: how fast bytes come, measured; from it, what it costs to bring an adapter back."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of a new measurement: a few loads decide, one slow load does not."""
_LEAST_S = 1e-9


class Rate:
    """Bytes per second, smoothed. Before the first measurement it is a guess."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def add(self, size_bytes: int, seconds: float) -> None:
        """So many bytes took so long; what took no time at all says nothing."""
        if size_bytes > 0 and seconds > _LEAST_S:
            # Seconds per byte are averaged, for it is seconds that are added up later.
            each_s = (1 - _WEIGHT) / self.bytes_per_s + _WEIGHT * seconds / size_bytes
            self.bytes_per_s = 1 / each_s

    def seconds(self, size_bytes: int) -> float:
        """What so many bytes will take."""
        return size_bytes / self.bytes_per_s
