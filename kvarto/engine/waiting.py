"""WaitingQueue: choices that want to run, in order. A heap; entries of choices that left are dropped when met."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

from kvarto.engine.request import Choice, Order, Status


class WaitingQueue:
    """Law: every waiting choice has exactly one entry that carries its ticket. See `check`."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, int, Choice]] = []
        self._last_ticket = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, choice: Choice) -> None:
        """Make `choice` waiting; a preempted one finds its old place by its order."""
        self._last_ticket += 1
        choice.ticket = self._last_ticket
        choice.status = Status.WAITING
        heapq.heappush(self._heap, (choice.order, choice.ticket, choice))
        self._num_waiting += 1

    @property
    def head(self) -> Choice | None:
        """The first in order; None when nothing waits."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def firsts(self, group: Callable[[Choice], Hashable]) -> list[Choice]:
        """The first of each group, in order. O(waiting)."""
        first: dict[Hashable, Choice] = {}
        for entry in self._heap:
            if self._is_valid(entry):
                choice = entry[2]
                key = group(choice)
                if key not in first or choice.order < first[key].order:
                    first[key] = choice
        return sorted(first.values(), key=lambda choice: choice.order)

    def remove(self, choice: Choice, status: Status) -> None:
        """Take a waiting choice out, into another status; its entry stays behind until it is met."""
        assert choice.status is Status.WAITING, f"choice {choice.order} is {choice.status}, not waiting"
        choice.status = status
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        valid = [entry[2] for entry in self._heap if self._is_valid(entry)]
        assert len(valid) == self._num_waiting, f"{len(valid)} valid entries, {self._num_waiting} choices wait"

    @staticmethod
    def _is_valid(entry: tuple[Order, int, Choice]) -> bool:
        return entry[2].status is Status.WAITING and entry[2].ticket == entry[1]
