"""Admitter: from the queue into the step, while slots and pages allow. What fits is arithmetic of the gate.

In order, but for what policies of adapters make of it: whoever is next and cannot run yet keeps the others waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.core.errors import OutOfPages
from kvarto.engine.admission import AdmissionGate
from kvarto.engine.chunker import Chunker
from kvarto.engine.crews import Crews
from kvarto.engine.next_in_queue import NextInQueue
from kvarto.engine.page_pressure import PagePressure
from kvarto.engine.parking import Parking
from kvarto.engine.request import Choice, Request, is_adapted
from kvarto.engine.roster import Roster
from kvarto.engine.step_plan import StepPlan

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache
    from kvarto.cache.sequence import Sequence


class Admitter:
    """Opens sequences for those that wait."""

    def __init__(
        self,
        cache: KVCache,
        roster: Roster,
        plan: StepPlan,
        gate: AdmissionGate,
        pressure: PagePressure,
        chunker: Chunker,
        crews: Crews,
        parking: Parking,
        queue: NextInQueue,
    ) -> None:
        self._cache = cache
        self._roster = roster
        self._plan = plan
        self._gate = gate
        self._pressure = pressure
        self._chunker = chunker
        self._crews = crews
        self._parking = parking
        self._queue = queue

    def admit(self, crew: Request | None) -> None:
        """Take choices of that crew from the queue into what is left of the step."""
        roster = self._roster
        barrier = self._parking.barrier
        while self._plan.tokens_left and not self._pressure.is_on and (choice := self._next()) is not None:
            if self._crews.is_mixed and not self._crews.belongs(choice, crew):
                return
            if barrier is not None and roster.running and barrier.order < choice.order:
                return
            can_run = roster.has_free_slot and self._try_admit(choice)
            if not can_run and not self._pressure.make_room_for(choice):
                return

    def _next(self) -> Choice | None:
        """The head while crews take turns, who are told apart by it; else whom the policies name."""
        if self._crews.is_mixed:
            return self._roster.waiting.head
        return self._queue.pick(self._roster.waiting, self._roster.running)

    def _try_admit(self, choice: Choice) -> bool:
        """Open a sequence on what the prefix cache has, and run when the rest will fit beside those that run."""
        running = self._roster.running
        if not self._gate.may_try(choice, running):
            return False
        sequence = self._open(choice)
        if sequence is None:
            return False
        if running and not self._has_room(choice, sequence):
            self._cache.close(sequence)
            return False
        if choice.request.collector is choice:
            choice.request.prompt_logprobs.clear()
        self._queue.note_admitted(choice)
        self._roster.start(choice, sequence)
        self._chunker.put(choice)
        return True

    def _open(self, choice: Choice) -> Sequence | None:
        request = choice.request
        use_prefix = not choice.distrusts_cache and request.collector is not choice
        resident = choice.resident if is_adapted(choice) else None
        try:
            return self._cache.open(
                choice.known_tokens,
                salt=request.salt,
                adapter_digest=b"" if resident is None else resident.digest,
                adapter_start=0 if resident is None else request.adapter_start or 0,
                adapter=None if resident is None else resident.unit,
                use_prefix=use_prefix,
            )
        except OutOfPages:
            if not self._roster.running:
                self._pressure.count_miss(choice)
            return None

    def _has_room(self, choice: Choice, sequence: Sequence) -> bool:
        """Beside those that run, now and for a while. Takes the pages of the first chunk, so that nobody is admitted
        on pages that count as available but cannot be had yet, because a copy still reads them.
        """
        while not self._gate.admits(choice, sequence, self._roster.running):
            if not self._roster.park_last(behind=choice):
                return False
        num_cached = sequence.num_computed_tokens
        try:
            self._cache.grow(sequence, min(choice.num_tokens, num_cached + self._plan.tokens_left))
            return True
        except OutOfPages:
            self._gate.refuse(choice, missing=1)
            return False
