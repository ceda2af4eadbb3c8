"""How long to wait before an engine is started again: not at all at first, longer while it keeps dying young."""

from __future__ import annotations

_FIRST_S = 0.25
_LONGEST_S = 10.0
_LIVED_WELL_S = 30.0


class Backoff:
    """0, 0.25, 0.5, 1 … 10 seconds; an engine that lived for 30 seconds starts the row anew."""

    def __init__(self) -> None:
        self._num_deaths = 0

    def died(self, lived_s: float) -> float:
        """An engine lived so long, or failed to start (0). Gives the seconds to wait."""
        if lived_s >= _LIVED_WELL_S:
            self._num_deaths = 0
        self._num_deaths += 1
        if self._num_deaths == 1:
            return 0.0
        return min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._num_deaths - 2, 10))
