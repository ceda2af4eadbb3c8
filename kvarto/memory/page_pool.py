"""PagePool: which pages of one tier are free, and who keeps the others. Ids and counts only, no bytes, no requests.

Flat arrays and no object per page, in native code (native/memory/page_pool.h): a call on a thousand pages takes
microseconds. A page carries two counts and one bit:

    ref_count   page tables and adapters that use it            free      = both counts 0, not cached
    pin_count   copies and steps that still read or write it    held      = ref_count > 0
    is_cached   the prefix cache knows its content              evictable = both counts 0, cached
                                                                draining  = ref_count 0, pin_count > 0

Law: free + held + evictable + draining = total. Pages leave a state only through the calls below; only evictable
pages are reclaimed. Free pages form a stack, lowest ids on top at the start.
Source: unified paging, S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvarto.core import _native
from kvarto.core.errors import OutOfPages
from kvarto.core.ids import OwnerId

NO_OWNER: Final = -1
"""Owner of a free page."""

Int32 = NDArray[np.int32]
_Element = TypeVar("_Element", np.int32, np.bool_)
_INT32 = np.dtype(np.int32)  # numpy looks a type up at each call, an instance it takes as it is


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


class PagePool(_native.memory.PagePool):
    """Equal pages, shared by owners. Beside what is here, it has these properties and calls, which are native:

        num_pages       of all states                       num_evictable   kept only for their content
        num_free        that `allocate` can hand out        num_draining    that nobody uses, but a copy still touches
        num_held        that somebody uses

        share(pages)    one more user for each, which is held or cached
        free(pages)     one user less; unused pages stay while they are pinned or cached, and those that are freed
                        together come back in the same order
        pin(pages)      whoever lets go of them, they are not handed out until as many `unpin`
        unpin(pages)    undoes one `pin`
        cache(ids)      the content of these pages, which are in use, is worth keeping; any iterable, few at a time
        uncache(pages)  the content of these cached pages is worth nothing; evictable ones become free

        is_held(page)   somebody uses it                    is_shared(page)  more than one: whoever wants to write
        is_pinned(page) a copy or a step touches it                          copies first

    `pages` are contiguous int32 arrays. Raises IndexError for ids that are no page (NO_PAGE is none), with nothing
    changed; AssertionError for a page in a state that the call does not allow, with some of the others changed.
    """

    def counts(self, owner: OwnerId) -> PageCounts:
        """Pages of one owner, now."""
        return PageCounts(*self.owner_counts(owner))

    def allocate(self, num_pages: int, owner: OwnerId) -> Int32:
        """Take `num_pages` pages with ref_count 1, all or none. Raises OutOfPages."""
        if num_pages > self.num_free:
            raise OutOfPages(
                f"asked for {num_pages} pages, {self.num_free} of {self.num_pages} free; "
                "raise `--device-memory` or lower `--max-num-seqs`"
            )
        pages = np.empty(num_pages, _INT32)
        self.take(pages, owner)
        return pages

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
        return _read_only(self._is_cached)

    @property
    def owner(self) -> Int32:
        """`[num_pages]`, read-only; NO_OWNER where free."""
        return _read_only(self._owner)

    def check(self) -> None:
        """Raise AssertionError naming the broken law. Counts everything again from the arrays: O(pages * owners)."""
        free = self._check_free()
        all_counts = PageCounts(self.num_held, self.num_evictable, self.num_draining)
        self._check_counts(all_counts, ~free, "all owners")
        by_owner = [self.counts(OwnerId(owner)) for owner in range(self.num_owners)]
        for owner, counts in enumerate(by_owner):
            self._check_counts(counts, self._owner == owner, f"owner {owner}")
        owned = sum(counts.total for counts in by_owner)
        assert self.num_free + owned == self.num_pages, f"{self.num_free} free + {owned} owned != {self.num_pages}"

    def _check_free(self) -> NDArray[np.bool_]:
        free: NDArray[np.bool_] = (self._ref_count == 0) & (self._pin_count == 0) & ~self._is_cached
        assert int(free.sum()) == self.num_free, f"{int(free.sum())} pages are free, {self.num_free} counted"
        stacked = np.sort(self._free[: self.num_free])
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


def _read_only(array: NDArray[_Element]) -> NDArray[_Element]:
    array.flags.writeable = False
    return array
