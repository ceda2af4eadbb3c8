"""Deadlines: which requests have run out of time. A heap; entries of requests that ended are dropped when met."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Deadlines:
    """Swept by every step, with new work or without."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float, live: Collection[str]) -> None:
        """Remember a deadline, in seconds on the engine's clock. `live` are the ids that have not ended."""
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[str]:
        """Ids whose deadline has come, each once; some may have ended before."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[1])
        return expired
