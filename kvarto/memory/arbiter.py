"""Arbiter: the one place where owners compete for pages. Knows what pages cost to bring back, not what they hold.

An owner offers *units*: pages that nobody uses and that leave together. The arbiter takes the unit with the least
priority, and asks its owner to forget it:

    priority = age + frequency * reload_cost_s / pages        age: the priority of the last unit taken, at last use

which is GreedyDual-Size-Frequency (Cherkasova, HPL-98-69R1): no clock, a heap, and old favourites fade because every
eviction raises the age of what is used afterwards. A unit that others depend on (the pages of a prefix, an adapter
under its KV) is never taken before them. Each owner has a floor of pages that others cannot push it below.

The heap is lazy: units that are used again stay in it and are dropped, or put back with their new priority, when they
come up. So using a unit costs nothing here; only letting go of it does (`offer`).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np

from kvarto.core.ids import OwnerId
from kvarto.memory.page_pool import PagePool

_MIN_COMPACTION = 1024


class Unit:
    """Pages that leave together. Owners subclass it to add what they need to find it again."""

    __slots__ = (
        "age",
        "depends_also",
        "depends_on",
        "frequency",
        "is_gone",
        "is_offered",
        "num_dependents",
        "owner",
        "pages",
        "reload_cost_s",
    )

    def __init__(
        self,
        owner: OwnerId,
        pages: tuple[int, ...],
        reload_cost_s: float,
        depends_on: Unit | None,
        depends_also: Unit | None = None,
    ) -> None:
        self.owner = owner
        self.pages = pages
        self.reload_cost_s = reload_cost_s
        """Seconds to bring all its pages back."""
        self.depends_on = depends_on
        """Worth nothing once that is gone, and therefore goes first."""
        self.depends_also = depends_also
        """The same for a second one, whose own users count its uses."""
        self.num_dependents = 0
        self.frequency = 0
        """Uses so far. A use of a unit is a use of what it depends on, and is handed down when it goes."""
        self.age = 0.0
        """The arbiter's age at the last use."""
        self.is_offered = False
        """In the arbiter's heap."""
        self.is_gone = False
        for base in self.bases:
            base.num_dependents += 1

    @property
    def bases(self) -> tuple[Unit, ...]:
        """All that it depends on."""
        return tuple(base for base in (self.depends_on, self.depends_also) if base is not None)

    @property
    def priority(self) -> float:
        """See the module."""
        return self.age + self.frequency * self.reload_cost_s / max(1, len(self.pages))


class Evictor(Protocol):
    """What an owner of units does for the arbiter."""

    def evict(self, unit: Unit) -> None:
        """Forget the unit, which is being taken; the arbiter uncaches its pages."""
        ...


class Arbiter:
    """Takes evictable pages from owners when others need them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._evictors: dict[OwnerId, Evictor] = {}
        self._floor_pages: dict[OwnerId, int] = {}
        self._heap: list[tuple[float, int, Unit]] = []
        self._order = count()
        self._num_gone = 0  # units in the heap that are gone
        self.age = 0.0
        """Rises with every eviction; what is used takes it over."""

    def register(self, owner: OwnerId, evictor: Evictor, *, floor_pages: int = 0) -> None:
        """Let an owner take part. Other owners cannot push it below `floor_pages` pages, used or not."""
        self._evictors[owner] = evictor
        self._floor_pages[owner] = floor_pages

    def use(self, unit: Unit) -> None:
        """The unit serves once more."""
        unit.frequency += 1
        unit.age = self.age

    def offer(self, unit: Unit) -> None:
        """A user let go of the unit. It may be taken once nobody uses it and nothing depends on it."""
        unit.age = self.age
        self._push(unit)

    def forget(self, unit: Unit) -> None:
        """The unit is gone, evicted or dropped by its owner; what it depended on may be offered now."""
        assert not unit.num_dependents, f"{unit.num_dependents} units depend on the one that goes"
        unit.is_gone = True
        self._num_gone += unit.is_offered
        if unit.depends_on is not None:
            unit.depends_on.frequency += unit.frequency
        for base in unit.bases:
            base.num_dependents -= 1
            base.age = max(base.age, unit.age)
            self._push(base)

    def num_available(self, owner: OwnerId) -> int:
        """Pages that `owner` can have now: free ones, and those that `reclaim` would free for it.

        Where the floor of another owner is near, it may be a few less: units leave whole.
        """
        available = self._pool.num_free + self._pool.num_evictable
        for other, floor_pages in self._floor_pages.items():
            if floor_pages and other != owner:
                counts = self._pool.counts(other)
                available -= max(0, counts.evictable - max(0, counts.total - floor_pages))
        return available

    def reclaim(self, num_pages: int, owner: OwnerId) -> int:
        """Evict until `num_pages` more pages are free, for `owner`, whose own floor does not protect it from itself.

        Returns pages freed: less than asked for when nothing more can go.
        """
        before = self._pool.num_free
        while (missing := before + num_pages - self._pool.num_free) > 0:
            if not self._take(missing, owner):
                break
        return self._pool.num_free - before

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        units = [unit for _, _, unit in self._heap]
        assert len(set(units)) == len(units), "a unit is in the heap twice"
        assert all(unit.is_offered for unit in units), "a unit is in the heap and not marked as offered"
        gone = sum(unit.is_gone for unit in units)
        assert gone == self._num_gone, f"{gone} units in the heap are gone, {self._num_gone} counted"

    def _take(self, num_pages: int, owner: OwnerId) -> bool:
        """Evict about `num_pages` pages at once; False when there was nothing to evict."""
        taken: dict[OwnerId, list[int]] = {}
        deferred: list[Unit] = []
        num_taken = 0
        while num_taken < num_pages and (unit := self._pop()) is not None:
            mine = taken.setdefault(unit.owner, [])
            if self._is_protected(unit, owner, len(mine)):
                deferred.append(unit)
                continue
            self.age = max(self.age, unit.priority)
            mine.extend(unit.pages)
            self._evictors[unit.owner].evict(unit)
            self.forget(unit)
            num_taken += len(unit.pages)
        for unit in deferred:
            self._push(unit)
        for pages in taken.values():
            self._pool.uncache(np.array(pages, dtype=np.int32))
        self._compact()
        return num_taken > 0

    def _is_protected(self, unit: Unit, owner: OwnerId, num_taken: int) -> bool:
        """By a pin, which passes, or by the floor of its owner."""
        if any(self._pool.is_pinned(page) for page in unit.pages):
            return True
        left = self._pool.counts(unit.owner).total - num_taken - len(unit.pages)
        return unit.owner != owner and left < self._floor_pages[unit.owner]

    def _pop(self) -> Unit | None:
        """The unit of least priority that nobody uses and nothing depends on."""
        while self._heap:
            priority, _, unit = heappop(self._heap)
            unit.is_offered = False
            self._num_gone -= unit.is_gone
            if unit.is_gone or unit.num_dependents or any(self._pool.is_held(page) for page in unit.pages):
                continue  # offered again when its last user lets go, or its last dependent goes
            if unit.priority > priority:  # used since it was offered
                self._push(unit)
                continue
            return unit
        return None

    def _push(self, unit: Unit) -> None:
        if unit.is_offered or unit.num_dependents or unit.is_gone:
            return
        unit.is_offered = True
        heappush(self._heap, (unit.priority, next(self._order), unit))

    def _compact(self) -> None:
        if self._num_gone > max(_MIN_COMPACTION, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if not entry[2].is_gone]
            heapify(self._heap)
            self._num_gone = 0
