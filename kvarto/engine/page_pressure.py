"""PagePressure: who gives way when pages are short. The last in order, so that the first always runs on.

Adapters that only waiting choices hold go before anybody. Whoever gives way loses all pages, waits at its old place and
is recomputed later. The first in order is preempted by nobody; a choice that has the pool to itself and still finds no
page, try after try, ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvarto.core.errors import OutOfPages
from kvarto.engine.admission import AdmissionGate
from kvarto.engine.request import Choice, sequence_of
from kvarto.engine.roster import Roster
from kvarto.engine.step_plan import StepPlan

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache

MAX_MISSES = 16
"""Tries of a choice that has the pool to itself and still finds no page, before it ends with an error."""


class PagePressure:
    """Pages for those that run, taken from others if need be."""

    def __init__(
        self, cache: KVCache, roster: Roster, plan: StepPlan, gate: AdmissionGate, *, has_copies: Callable[[], bool]
    ) -> None:
        """`has_copies` says whether copies are in flight, whose end may free pages."""
        self.is_on = False
        """Somebody gave way in this step, so nobody is admitted in it."""
        self.num_preemptions = 0
        self._cache = cache
        self._roster = roster
        self._plan = plan
        self._gate = gate
        self._has_copies = has_copies
        self._starved: list[Choice] = []

    def begin(self) -> None:
        """A new step."""
        self.is_on = False

    def grow(self, choice: Choice, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, taken from whoever is later in order if need be."""
        running = self._roster.running
        while True:
            try:
                self._cache.grow(sequence_of(choice), num_tokens)
                return True
            except OutOfPages:
                if self._roster.park_last():
                    continue
                last = running[-1]
                if last is not choice:
                    self._preempt(last)
                elif len(running) > 1:
                    self._preempt(choice)
                    return False
                else:
                    self.count_miss(choice)
                    return False

    def make_room_for(self, choice: Choice) -> bool:
        """Let the last that runs give way to a waiting choice of a better priority; False where it has none."""
        running = self._roster.running
        if not running or running[-1].order[0] <= choice.order[0]:
            return False
        self.requeue(running[-1])
        self.num_preemptions += 1
        return True

    def requeue(self, choice: Choice) -> None:
        """Take a choice, and those that would fork from it, out of the step and back into the queue."""
        chunk = self._plan.drop(choice)
        if chunk is not None:
            self._roster.unseat_forks(chunk)
        self._roster.requeue(choice)

    def count_miss(self, choice: Choice) -> None:
        """Nobody is left to give way. Copies in flight may still return pages; otherwise patience is limited."""
        if self._has_copies():
            return
        choice.num_misses += 1
        if choice.num_misses >= MAX_MISSES:
            self._starved.append(choice)

    def take_starved(self) -> list[Choice]:
        """Choices whose patience has ended since the last call."""
        starved, self._starved = self._starved, []
        return starved

    def _preempt(self, choice: Choice) -> None:
        self.is_on = True
        self.num_preemptions += 1
        choice.num_preemptions += 1
        self.requeue(choice)
        # Its own pages are no reason to try it again: what counts as available may be held up by a copy for a while.
        self._gate.refuse(choice, missing=1)
