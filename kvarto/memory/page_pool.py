"""PagePool: which pages of one tier are free, and who keeps the others. Ids and counts only, no bytes, no requests.

Flat arrays and no object per page: a call on a thousand pages is a handful of array operations. A page carries two
counts and one bit:

    ref_count   page tables and adapters that use it            free      = both counts 0, not cached
    pin_count   copies and steps that still read or write it    held      = ref_count > 0
    is_cached   the prefix cache knows its content              evictable = both counts 0, cached
                                                                draining  = ref_count 0, pin_count > 0

Law: free + held + evictable + draining = total. Pages leave a state only through the calls below; only evictable
pages are reclaimed. Free pages form a stack, lowest ids on top at the start.
Source: unified paging, S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import OutOfPages
from kvarto.core.ids import OwnerId

NO_OWNER: Final = -1
"""Owner of a free page."""

Int32 = NDArray[np.int32]
_Index = NDArray[np.intp]
_UINT32 = np.dtype(np.uint32)  # numpy looks a type up at each call, an instance it takes as it is
_INTP = np.dtype(np.intp)


@dataclass(slots=True)
class PageCounts:
    """Pages that are not free, by state."""

    held: int = 0
    evictable: int = 0
    draining: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.held + self.evictable + self.draining


class PagePool:
    """Equal pages, shared by owners.

    Arguments named `pages` are int32 arrays of distinct ids; the pages of one call have one owner.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._ref_count = np.zeros(num_pages, dtype=np.int32)
        self._pin_count = np.zeros(num_pages, dtype=np.int32)
        self._is_cached = np.zeros(num_pages, dtype=np.bool_)
        self._owner = np.full(num_pages, NO_OWNER, dtype=np.int32)
        self._all = PageCounts()
        self._by_owner: list[PageCounts] = []

    @property
    def num_pages(self) -> int:
        """Pages of all states."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Pages that somebody uses."""
        return self._all.held

    @property
    def num_evictable(self) -> int:
        """Pages that are kept only for their content."""
        return self._all.evictable

    @property
    def num_draining(self) -> int:
        """Pages that nobody uses, but that a copy still touches."""
        return self._all.draining

    def counts(self, owner: OwnerId) -> PageCounts:
        """Pages of one owner."""
        return self._by_owner[owner] if owner < len(self._by_owner) else PageCounts()

    def allocate(self, num_pages: int, owner: OwnerId) -> Int32:
        """Take `num_pages` pages with ref_count 1, all or none. Raises OutOfPages."""
        if num_pages > self._num_free:
            raise OutOfPages(
                f"asked for {num_pages} pages, {self._num_free} of {self.num_pages} free; "
                "raise `--device-memory` or lower `--max-num-seqs`"
            )
        top = self._num_free
        self._num_free = top - num_pages
        pages = self._free[self._num_free : top][::-1].copy()
        self._ref_count[pages] = 1
        self._owner[pages] = owner
        self._all.held += num_pages
        self._counts_of(owner).held += num_pages
        return pages

    def share(self, pages: Int32) -> None:
        """One more user for each of these pages, which are held or cached."""
        index = _index(pages)
        counts = self._ref_count[index]
        self._ref_count[index] = counts + 1
        num_unused = len(index) - int(np.count_nonzero(counts))
        if num_unused:
            unused = index[counts == 0]
            assert self._is_cached[unused].all(), f"shared pages that hold nothing: {unused[~self._is_cached[unused]]}"
            num_draining = int(np.count_nonzero(self._pin_count[unused]))
            self._count(
                self._counts_at(unused),
                held=num_unused,
                evictable=num_draining - num_unused,
                draining=-num_draining,
            )

    def free(self, pages: Int32) -> None:
        """One user less for each of these pages. Unused pages stay while they are pinned or cached."""
        index = _index(pages)
        counts = self._ref_count[index] - 1
        assert not np.count_nonzero(counts < 0), f"freed pages that nobody holds: {index[counts < 0]}"
        self._ref_count[index] = counts
        if np.count_nonzero(counts):
            index = index[counts == 0]
        if len(index):
            self._all.held -= len(index)
            self._counts_at(index).held -= len(index)
            self._settle(index)

    def pin(self, pages: Int32) -> None:
        """Keep these pages from being handed out, whoever lets go of them, until as many `unpin`."""
        index = _index(pages)
        num_pins = self._pin_count[index]
        self._pin_count[index] = num_pins + 1
        unused = index[(num_pins == 0) & (self._ref_count[index] == 0)]
        if len(unused):
            assert self._is_cached[unused].all(), f"pinned pages that hold nothing: {unused[~self._is_cached[unused]]}"
            self._count(self._counts_at(unused), evictable=-len(unused), draining=len(unused))

    def unpin(self, pages: Int32) -> None:
        """Undo one `pin`."""
        index = _index(pages)
        num_pins = self._pin_count[index] - 1
        assert not len(index) or num_pins.min() >= 0, f"unpinned pages that nobody pinned: {index[num_pins < 0]}"
        self._pin_count[index] = num_pins
        unused = index[(num_pins == 0) & (self._ref_count[index] == 0)]
        if len(unused):
            self._count(self._counts_at(unused), draining=-len(unused))
            self._settle(unused)

    def cache(self, pages: Iterable[int]) -> None:
        """The content of these pages, which are in use, is worth keeping. Few at a time, as they fill."""
        for page in pages:
            assert self._ref_count[page] > 0, f"cached page {page}, which nobody holds"
            self._is_cached[page] = True

    def uncache(self, pages: Int32) -> None:
        """The content of these cached pages is worth nothing. Evictable ones become free."""
        index = _index(pages)
        assert self._is_cached[index].all(), f"uncached pages that are not cached: {index[~self._is_cached[index]]}"
        self._is_cached[index] = False
        evictable = index[(self._ref_count[index] == 0) & (self._pin_count[index] == 0)]
        if len(evictable):
            self._count(self._counts_at(evictable), evictable=-len(evictable))
            self._push(evictable)

    def is_held(self, page: int) -> bool:
        """Somebody uses the page."""
        return bool(self._ref_count[page] > 0)

    def is_pinned(self, page: int) -> bool:
        """A copy or a step still touches the page."""
        return bool(self._pin_count[page] > 0)

    def is_shared(self, page: int) -> bool:
        """More than one user: whoever wants to write copies first."""
        return bool(self._ref_count[page] > 1)

    @property
    def ref_count(self) -> Int32:
        """`[num_pages]`, read-only."""
        return _read_only(self._ref_count)

    @property
    def pin_count(self) -> Int32:
        """`[num_pages]`, read-only."""
        return _read_only(self._pin_count)

    @property
    def is_cached(self) -> NDArray[np.bool_]:
        """`[num_pages]`, read-only."""
        view = self._is_cached.view()
        view.flags.writeable = False
        return view

    @property
    def owner(self) -> Int32:
        """`[num_pages]`, read-only; NO_OWNER where free."""
        return _read_only(self._owner)

    def check(self) -> None:
        """Raise AssertionError naming the broken law. Counts everything again from the arrays: O(pages)."""
        free = self._check_free()
        self._check_counts(self._all, ~free, "all owners")
        for owner, counts in enumerate(self._by_owner):
            self._check_counts(counts, self._owner == owner, f"owner {owner}")
        owned = sum(counts.total for counts in self._by_owner)
        assert self._num_free + owned == self.num_pages, f"{self._num_free} free + {owned} owned != {self.num_pages}"

    def _check_free(self) -> NDArray[np.bool_]:
        free: NDArray[np.bool_] = (self._ref_count == 0) & (self._pin_count == 0) & ~self._is_cached
        assert int(free.sum()) == self._num_free, f"{int(free.sum())} pages are free, {self._num_free} counted"
        stacked = np.sort(self._free[: self._num_free])
        assert np.array_equal(stacked, np.flatnonzero(free)), "the stack of free pages holds others, or some twice"
        assert np.array_equal(free, self._owner == NO_OWNER), "a free page has an owner, or another has none"
        assert self._ref_count.min(initial=0) >= 0, "a ref_count is negative"
        assert self._pin_count.min(initial=0) >= 0, "a pin_count is negative"
        return free

    def _check_counts(self, counts: PageCounts, mask: NDArray[np.bool_], whose: str) -> None:
        held = self._ref_count > 0
        pinned = self._pin_count > 0
        found = PageCounts(
            held=int((mask & held).sum()),
            evictable=int((mask & ~held & ~pinned & self._is_cached).sum()),
            draining=int((mask & ~held & pinned).sum()),
        )
        assert found == counts, f"pages of {whose}: found {found}, counted {counts}"

    def _settle(self, index: _Index) -> None:
        """Pages that nobody uses any more go where they belong; they are counted nowhere when this is called."""
        cached = self._is_cached[index]
        pins = self._pin_count[index]
        num_draining = int(np.count_nonzero(pins))
        if num_draining or np.count_nonzero(cached):
            stays = cached | (pins > 0)
            num_evictable = int(np.count_nonzero(stays)) - num_draining
            self._count(self._counts_at(index), evictable=num_evictable, draining=num_draining)
            index = index[~stays]
        self._push(index)

    def _push(self, index: _Index) -> None:
        top = self._num_free + len(index)
        # Reversed, as `allocate` reverses: pages freed together come back in the same order.
        self._free[self._num_free : top] = index[::-1]
        self._num_free = top
        self._owner[index] = NO_OWNER

    def _counts_at(self, index: _Index) -> PageCounts:
        return self._by_owner[int(self._owner[index[0]])]

    def _counts_of(self, owner: OwnerId) -> PageCounts:
        while owner >= len(self._by_owner):
            self._by_owner.append(PageCounts())
        return self._by_owner[owner]

    def _count(self, counts: PageCounts, held: int = 0, evictable: int = 0, draining: int = 0) -> None:
        for each in (self._all, counts):
            each.held += held
            each.evictable += evictable
            each.draining += draining


def _index(pages: Int32) -> _Index:
    """Ids as numpy wants them. Unsigned first, so that NO_PAGE is out of range instead of the last page."""
    return pages.view(_UINT32).astype(_INTP)


def _read_only(array: Int32) -> Int32:
    view = array.view()
    view.flags.writeable = False
    return view
