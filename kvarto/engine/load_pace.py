"""LoadPace: how long an adapter has to wait for its turn to come to the device, from how fast others came.

Only the time counts in which some wait, so what is measured is a line that moves: files, copies and pages that others
hold, whatever is slowest now. A line that stops makes the estimate rise.
"""

from __future__ import annotations

from kvarto.core.clock import Clock
from kvarto.engine.pace import Pace

_LEAST_LOADS = 4
"""Before so many were seen nothing is said."""


class LoadPace:
    """Told once per step what there is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pace = Pace()
        self._waited_s = 0.0
        """Time in which somebody waited, since start."""
        self._last_s = clock.now()
        self._was_waiting = False
        self._num_loads = 0

    def note(self, *, is_waiting: bool, num_loads: int) -> None:
        """Does anybody wait for an adapter, and how many have arrived since start?"""
        now_s = self._clock.now()
        if self._was_waiting:
            self._waited_s += now_s - self._last_s
        self._last_s, self._was_waiting = now_s, is_waiting
        for _ in range(num_loads - self._num_loads):
            self._pace.note_end(self._waited_s)
        self._num_loads = num_loads

    def wait_s(self, num_before: int) -> float:
        """Until those before it have arrived: whoever is first in the line waits for nobody. 0 while not known."""
        each_s = self._pace.seconds_each(self._waited_s, least=_LEAST_LOADS)
        return 0.0 if each_s is None else each_s * num_before
