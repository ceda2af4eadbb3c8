"""Roster: where each choice of each request is. Moves between the places, no policy.

                        ┌────────── requeue ───────────┐
                        v                              │
    held ── promote ──> waiting ── start ──> running ──┴── finish ──> finished
      │                   ⇅ parked: its adapter is not on the device (`parking`)
      └──────── seat_forks, start_fork ─────────┘

A choice is held while its leader computes the prompt that they share. Whoever runs has a slot, and a sequence from the
moment that it has something in the cache. Laws, see `check`: a slot has one owner; whoever runs is in order; nobody is
held without a leader.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from kvarto.engine.admission import AdmissionGate
from kvarto.engine.chunk import Chunk
from kvarto.engine.parking import Parking
from kvarto.engine.request import Choice, Order, Request, Status, sequence_of
from kvarto.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from kvarto.cache.kv_cache import KVCache
    from kvarto.cache.sequence import Sequence


class Roster:
    """Requests that have not ended, and their choices."""

    def __init__(self, cache: KVCache, max_seqs: int, gate: AdmissionGate, parking: Parking) -> None:
        """`gate` hears of room that somebody gives back, `parking` of all that concerns adapters."""
        self.requests: dict[str, Request] = {}
        """By id."""
        self.running: list[Choice] = []
        """Those with a sequence, in order."""
        self.waiting = WaitingQueue()
        self.num_unadmitted = 0
        """Requests of which no choice has run."""
        self._cache = cache
        self._max_seqs = max_seqs
        self._gate = gate
        self._parking = parking
        self._free_slots = list(range(max_seqs - 1, -1, -1))

    @property
    def num_running(self) -> int:
        """Choices with a slot."""
        return self._max_seqs - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Choices without a slot, those that wait for their leader included."""
        num_held = sum(len(request.held) for request in self.requests.values() if request.held)
        return len(self.waiting) + len(self._parking) + num_held

    @property
    def has_free_slot(self) -> bool:
        """One more choice may run."""
        return bool(self._free_slots)

    # ---- in ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request: choices that have tokens, and one leader for those that have none."""
        self.requests[request.request_id] = request
        self._parking.add(request)
        self.num_unadmitted += 1
        request.held = [choice for choice in request.choices if not choice.output]
        for choice in request.choices:
            if choice.output:
                self._queue(choice)
        self._promote(request)

    def unpark(self, choices: Items[Choice]) -> None:
        """Choices that hold their adapter now go to their places in the queue."""
        for choice in choices:
            self._queue(choice)

    def _queue(self, choice: Choice) -> None:
        """Into the queue, or where it waits for its adapter."""
        if self._parking.may_wait(choice):
            self.waiting.push(choice)

    def park_last(self, behind: Choice | None = None) -> bool:
        """Pages are short: let waiting choices go of an adapter that nobody else uses. False where there is none."""
        choices = self._parking.park_last(behind)
        for choice in choices:
            self.waiting.remove(choice, Status.PARKED)
            self._parking.park(choice)
        if choices:
            self._gate.note_room()
        return bool(choices)

    def start(self, choice: Choice, sequence: Sequence) -> None:
        """The waiting `choice` runs, on what `sequence` has."""
        self.waiting.remove(choice, Status.RUNNING)
        self._parking.start(choice)
        self._take_slot(choice)
        choice.sequence = sequence
        choice.num_computed_tokens = sequence.num_computed_tokens
        insort(self.running, choice, key=_order)
        request = choice.request
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(sequence.num_cached_tokens, request.num_prompt_tokens)
            self.num_unadmitted -= 1

    def _take_slot(self, choice: Choice) -> None:
        choice.slot = self._free_slots.pop()
        choice.status = Status.RUNNING
        choice.prepare()

    # ---- leaders and forks -------------------------------------------------------------------------------------

    def seat_forks(self, leader: Choice) -> list[Choice]:
        """Slots for as many of the choices that wait for `leader` as there are."""
        held = leader.request.held
        count = min(len(held), len(self._free_slots))
        forks, leader.request.held = held[:count], held[count:]
        for choice in forks:
            self._take_slot(choice)
            self._parking.share(leader, choice)
        return forks

    def unseat_forks(self, chunk: Chunk) -> None:
        """Those that would have forked in a step that does not come about wait for their leader again."""
        for fork in chunk.forks:
            self._free_slots.append(fork.slot)
            self._parking.release(fork)
            fork.status = Status.HELD
        request = chunk.choice.request
        request.held = sorted([*chunk.forks, *request.held], key=_order)
        chunk.forks = []

    def start_fork(self, leader: Choice, fork: Choice) -> None:
        """Let `fork` go on from the pages of `leader`."""
        fork.sequence = self._cache.fork(sequence_of(leader))
        fork.num_computed_tokens = leader.num_computed_tokens
        insort(self.running, fork, key=_order)

    def release_held(self, request: Request) -> None:
        """The choices for which there was no slot get a leader of their own, unless they have one."""
        if not any(map(_may_lead, request.choices)):
            self._promote(request)

    def _promote(self, request: Request) -> None:
        """Queue the first held choice; the others wait for it to compute the prompt."""
        if request.held:
            leader, *request.held = request.held
            if request.collector is not None:
                request.collector = leader
            self._queue(leader)

    # ---- back, and out -----------------------------------------------------------------------------------------

    def requeue(self, choice: Choice) -> None:
        """Slot and pages go back, and the choice waits at its old place."""
        self._stop_running(choice)
        self._queue(choice)

    def finish(self, choice: Choice) -> bool:
        """A choice ends, in any state. True when its request ended with it."""
        request = choice.request
        if choice.status is Status.RUNNING:
            self._stop_running(choice)
        elif choice.status is Status.WAITING:
            self.waiting.remove(choice, Status.FINISHED)
        elif choice.status is Status.HELD:
            request.held.remove(choice)
        if choice.request.adapter is not None:
            self._parking.release(choice)
            self._gate.note_room()
        choice.status = Status.FINISHED
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)
            return True
        if request.held:
            self.release_held(request)
        return False

    def _stop_running(self, choice: Choice) -> None:
        """Give back slot and pages."""
        self._free_slots.append(choice.slot)
        choice.num_computed_tokens = 0
        if choice.sequence is not None:  # a fork that ends with its first token has none
            del self.running[bisect_left(self.running, choice.order, key=_order)]
            self._cache.close(choice.sequence)
            choice.sequence = None
        self._gate.note_room()

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._parking.remove(request)
        if not request.was_admitted:
            self.num_unadmitted -= 1

    # ---- laws --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        self.waiting.check()
        assert self.running == sorted(self.running, key=_order), "running choices are out of order"
        slots = [choice.slot for choice in self.running] + self._free_slots
        assert sorted(slots) == list(range(self._max_seqs)), f"slots {sorted(slots)} are not each owned once"
        choices = [choice for request in self.requests.values() for choice in request.choices]
        unfinished = [choice for choice in choices if choice.status is not Status.FINISHED]
        held = sum(len(request.held) for request in self.requests.values())
        num_waiting = len(self.waiting) + len(self._parking) + held
        assert len(unfinished) == len(self.running) + num_waiting, "a choice is nowhere, or twice"
        self._parking.check()
        for request in self.requests.values():
            assert not request.held or any(map(_may_lead, request.choices)), f"{request.request_id} waits for nobody"


def _order(choice: Choice) -> Order:
    return choice.order


def _may_lead(choice: Choice) -> bool:
    return not choice.output and choice.status in (Status.WAITING, Status.PARKED, Status.RUNNING)
