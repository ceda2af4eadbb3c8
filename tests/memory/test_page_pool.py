"""The pool against a model that keeps a record per page, and what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarto.core.errors import OutOfPages
from kvarto.core.ids import NO_PAGE, OwnerId
from kvarto.memory.page_pool import NO_OWNER, PagePool

OWNER = OwnerId(0)


@dataclass
class Record:
    """One page as the model sees it."""

    refs: int = 0
    pins: int = 0
    is_cached: bool = False
    owner: int = NO_OWNER

    @property
    def state(self) -> str:
        if self.refs:
            return "held"
        if self.pins:
            return "draining"
        return "evictable" if self.is_cached else "free"


class PoolMachine(RuleBasedStateMachine):
    """Any legal order of calls, on any legal set of pages."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.records = [Record() for _ in range(num_pages)]

    def _some(self, data: st.DataObject, are_legal: list[int]) -> np.ndarray:
        """Distinct pages of one owner, in any order."""
        if not are_legal:
            return np.empty(0, dtype=np.int32)
        owner = self.records[data.draw(st.sampled_from(are_legal))].owner
        mine = [page for page in are_legal if self.records[page].owner == owner]
        return np.array(data.draw(st.lists(st.sampled_from(mine), unique=True)), dtype=np.int32)

    def _where(self, *states: str) -> list[int]:
        return [page for page, record in enumerate(self.records) if record.state in states]

    @rule(num_pages=st.integers(0, 13), owner=st.integers(0, 2))
    def allocate(self, num_pages: int, owner: int) -> None:
        free = self._where("free")
        if num_pages > len(free):
            with pytest.raises(OutOfPages, match=f"asked for {num_pages} pages, {len(free)} of"):
                self.pool.allocate(num_pages, OwnerId(owner))
            return
        pages = self.pool.allocate(num_pages, OwnerId(owner))
        assert len(set(pages.tolist())) == num_pages
        assert set(pages.tolist()) <= set(free)
        for page in pages:
            self.records[page] = Record(refs=1, owner=owner)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        legal = [p for p in self._where("held", "evictable", "draining") if self._is_usable(p)]
        pages = self._some(data, legal)
        self.pool.share(pages)
        for page in pages:
            self.records[page].refs += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self._some(data, self._where("held"))
        self.pool.free(pages)
        for page in pages:
            self.records[page].refs -= 1

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = self._some(data, self._where("held", "evictable", "draining"))
        self.pool.pin(pages)
        for page in pages:
            self.records[page].pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pages = self._some(data, [page for page, record in enumerate(self.records) if record.pins])
        self.pool.unpin(pages)
        for page in pages:
            self.records[page].pins -= 1

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        pages = self._some(data, self._where("held"))
        self.pool.cache(pages.tolist())
        for page in pages:
            self.records[page].is_cached = True

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        pages = self._some(data, [page for page, record in enumerate(self.records) if record.is_cached])
        self.pool.uncache(pages)
        for page in pages:
            self.records[page].is_cached = False

    @precondition(lambda self: self._where("free"))
    @rule(data=st.data(), call=st.sampled_from(["share", "free", "pin", "unpin", "cache", "uncache"]))
    def refuse_free_pages(self, data: st.DataObject, call: str) -> None:
        page = data.draw(st.sampled_from(self._where("free")))
        with pytest.raises(AssertionError):
            getattr(self.pool, call)(np.array([page], dtype=np.int32))
        self._rebuild()

    def _rebuild(self) -> None:
        """A broken law may leave a pool in any state; the machine goes on with a fresh one."""
        self.pool = PagePool(len(self.records))
        self.records = [Record() for _ in self.records]

    def _is_usable(self, page: int) -> bool:
        return bool(self.records[page].refs) or self.records[page].is_cached

    @invariant()
    def counts_are_those_of_the_records(self) -> None:
        if not hasattr(self, "pool"):
            return
        for record in self.records:
            if record.state == "free":
                record.owner = NO_OWNER
        states = Counter(record.state for record in self.records)
        pool = self.pool
        assert pool.num_free == states["free"]
        assert pool.num_held == states["held"]
        assert pool.num_evictable == states["evictable"]
        assert pool.num_draining == states["draining"]
        assert pool.num_free + pool.num_held + pool.num_evictable + pool.num_draining == pool.num_pages
        assert pool.ref_count.tolist() == [record.refs for record in self.records]
        assert pool.pin_count.tolist() == [record.pins for record in self.records]
        assert pool.is_cached.tolist() == [record.is_cached for record in self.records]
        assert pool.owner.tolist() == [record.owner for record in self.records]
        for owner in range(3):
            mine = Counter(record.state for record in self.records if record.owner == owner)
            counts = pool.counts(OwnerId(owner))
            assert (counts.held, counts.evictable, counts.draining) == (
                mine["held"],
                mine["evictable"],
                mine["draining"],
            )
        pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_pages_come_lowest_first_and_return_in_order() -> None:
    pool = PagePool(10)
    first = pool.allocate(4, OWNER)
    assert first.tolist() == [0, 1, 2, 3]
    pool.allocate(2, OWNER)
    pool.free(first)
    assert pool.allocate(5, OWNER).tolist() == [0, 1, 2, 3, 6]


def test_a_refused_allocation_takes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2, OWNER)
    with pytest.raises(OutOfPages, match="asked for 2 pages, 1 of 3 free.*--device-memory"):
        pool.allocate(2, OWNER)
    pool.check()
    assert pool.num_free == 1


@pytest.mark.parametrize("call", ["share", "free", "pin", "unpin", "uncache"])
def test_no_page_is_never_taken_for_the_last_one(call: str) -> None:
    pool = PagePool(4)
    pool.allocate(4, OWNER)
    with pytest.raises(IndexError):
        getattr(pool, call)(np.array([0, NO_PAGE], dtype=np.int32))


def test_views_are_read_only() -> None:
    pool = PagePool(4)
    for view in (pool.ref_count, pool.pin_count, pool.is_cached, pool.owner):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


@pytest.mark.parametrize("law", ["ref_count", "pin_count", "is_cached", "owner", "free"])
def test_check_notices_what_somebody_else_changed(law: str) -> None:
    pool = PagePool(6)
    pool.allocate(2, OWNER)
    getattr(pool, f"_{law}")[3] += 1
    with pytest.raises(AssertionError):
        pool.check()


def test_a_draining_page_is_free_only_after_its_last_pin() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1, OWNER)
    pool.pin(pages)
    pool.pin(pages)
    pool.free(pages)
    pool.unpin(pages)
    assert (pool.num_draining, pool.num_free) == (1, 1)
    pool.unpin(pages)
    assert (pool.num_draining, pool.num_free) == (0, 2)


@pytest.mark.parametrize("call", ["free", "unpin", "uncache"])
def test_a_page_named_twice_goes_once(call: str) -> None:
    pool = PagePool(4)
    pages = pool.allocate(3, OWNER)
    if call == "unpin":
        pool.pin(pages)
    pool.cache([0, 1, 2] if call == "uncache" else [])
    if call != "free":
        pool.free(pages)
    with pytest.raises(AssertionError, match="page 1"):
        getattr(pool, call)(np.array([0, 1, 1], dtype=np.int32))
    pool.check()
    assert pool.num_free == 2


@pytest.mark.parametrize(
    "pages", [np.zeros(1, np.int64), np.zeros(1, np.uint32), np.zeros(4, np.int32)[::2], [0], None]
)
def test_ids_are_contiguous_int32(pages: object) -> None:
    pool = PagePool(4)
    pool.allocate(2, OWNER)
    with pytest.raises((ValueError, TypeError)):
        pool.free(pages)  # type: ignore[arg-type]
    assert pool.num_held == 2


@pytest.mark.parametrize("page", [-1, 4, 1 << 40])
def test_single_ids_are_pages_of_the_pool(page: int) -> None:
    pool = PagePool(4)
    for call in (pool.is_held, pool.is_pinned, pool.is_shared, lambda page: pool.cache([page])):
        with pytest.raises(IndexError):
            call(page)


@pytest.mark.parametrize("num_pages", [-1, 1 << 31])
def test_a_pool_has_ids_of_31_bits(num_pages: int) -> None:
    with pytest.raises(ValueError, match="31 bits"):
        PagePool(num_pages)


def test_views_outlive_their_pool() -> None:
    pool = PagePool(1000)
    pool.allocate(10, OWNER)
    view = pool.ref_count
    del pool
    assert int(view.sum()) == 10
