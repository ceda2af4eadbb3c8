"""Crews: who may share a step. Everybody with everybody, but a request that `runs_alone` with nobody.

Such a request is suspected of killing engines: when it dies alone, it has no company to be confused with. While one is
there, crews take turns, the one that waited longest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.engine.request import Choice, Request


class Crews:
    """None stands for the crew of all ordinary requests."""

    def __init__(self) -> None:
        self._last_turn: dict[Request | None, int] = {None: 0}
        self._turn = 0

    @property
    def is_mixed(self) -> bool:
        """There is more than the ordinary crew."""
        return len(self._last_turn) > 1

    def add(self, request: Request) -> None:
        """A request was queued."""
        if request.runs_alone:
            self._last_turn[request] = self._turn

    def remove(self, request: Request) -> None:
        """A request ended."""
        if request.runs_alone:
            del self._last_turn[request]

    def belongs(self, choice: Choice, crew: Request | None) -> bool:
        """Whether `choice` is of that crew."""
        return crew_of(choice) is crew

    def next(self, running: Sequence[Choice], head: Choice | None) -> Request | None:
        """Whose turn it is, among those that run and the one that comes next."""
        if not self.is_mixed:
            return None
        candidates = [*running, head] if head is not None else running
        present = dict.fromkeys(crew_of(choice) for choice in candidates)  # ordered, so that ties are settled alike
        crew = min(present, key=lambda each: self._last_turn[each], default=None)
        self._turn += 1
        self._last_turn[crew] = self._turn
        return crew


def crew_of(choice: Choice) -> Request | None:
    """The request itself when it runs alone, else None."""
    return choice.request if choice.request.runs_alone else None
