"""Residency: adapters on the device, in the same pages as the KV cache.

    want ──> identifying ──> reading ──> ready ── take: pages ──> copying ── bind ──> resident
             registry        host tier            pool, arbiter   pinned              a unit of the arbiter

`want` begins when a request is queued and goes on in the background; `take` waits for whoever says that pages may be
taken. What is resident is held while a choice uses it. What nobody holds keeps its pages, as a unit that the arbiter
may take like any other: the KV that was computed with an adapter depends on its unit and goes before it. Names play no
part: two versions of equal content are one resident. Pages that are equal to those of a resident are not there twice:
whoever came later depends on it, and holds it along.

Copies read host memory and write pages in a thread. Both stay until no thread touches them, also when nobody waits any
more: pages are pinned, the host's entry is held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.common_pages import CommonPages
from kvarto.adapters.host_entry import HostEntry, HostState
from kvarto.adapters.host_tier import HostTier, load_error
from kvarto.adapters.load import Load, Stage
from kvarto.adapters.rate import Rate
from kvarto.adapters.registry import AdapterVersion, Registry, VersionState
from kvarto.adapters.resident import AdapterUnit, PageShare, Resident
from kvarto.adapters.source import FoundAdapter
from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.clock import Clock
from kvarto.core.errors import KvartoError, OutOfPages, TransferFailed
from kvarto.core.ids import MAX_ADAPTERS, OwnerId
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.calls import Call, Calls
from kvarto.memory.page_pool import PagePool
from kvarto.memory.tasks import TaskState
from kvarto.ops.base import Backend

Int32 = NDArray[np.int32]
Bind = Callable[[FoundAdapter, Int32], BoundAdapter]
"""From an adapter and its pages to what a backend needs."""

MAX_OPENED = 8
"""Adapters whose files are opened at a time: each of these calls has a deadline, which begins with it."""
COPY_BYTES = 8 << 20
"""Filled by one call: a few milliseconds of copying, so that calls cost little and end soon."""
_FIRST_GUESS = 4e9
"""Bytes per second from host memory into pages, before they were measured."""
_POISON = 0xFF
"""NaN in each type that adapters and KV have."""


class Residency:
    """The device tier; an evictor of the arbiter. One thread calls it."""

    def __init__(
        self,
        *,
        registry: Registry,
        host: HostTier,
        pool: PagePool,
        arbiter: Arbiter,
        copies: Calls,
        backend: Backend,
        bind: Bind,
        owner: OwnerId,
        clock: Clock,
        floor_pages: int = 0,
        max_shared_pages: int = 0,
        copy_bytes: int = COPY_BYTES,
        on_drop: Callable[[Unit], None] = lambda unit: None,
        poisons: bool = False,
    ) -> None:
        """`max_shared_pages`: an adapter that would hold more, with those that it has pages in common with, gets pages
        of its own instead; whoever runs alone must have room beside them. `copy_bytes`: of pages that are filled by one
        call, at least one page. `on_drop` forgets all that depends on the unit of an adapter that was unloaded.
        `poisons`: pages that adapters leave are filled with NaN, for tests.
        """
        self.num_loads = 0
        self.num_hits = 0
        """Times that a choice found its adapter resident."""
        self.num_evictions = 0
        self.num_failures = 0
        self.load_seconds = 0.0
        """Of all loads, from the first wish to residency."""
        self.rate = Rate(_FIRST_GUESS)
        self._registry = registry
        self._host = host
        self._pool = pool
        self._arbiter = arbiter
        self._copies = copies
        self._backend = backend
        self._bind = bind
        self._owner = owner
        self._page_bytes = host.page_bytes
        self._pages_at_once = max(1, copy_bytes // host.page_bytes)
        self._clock = clock
        self._max_shared_pages = max_shared_pages
        self._on_drop = on_drop
        self._poisons = poisons
        self._residents: dict[bytes, Resident] = {}
        self._loads: dict[AdapterVersion, Load] = {}
        self._by_digest: dict[bytes, Load] = {}
        """The load that brings a content, from its reading on; others of equal content wait for it."""
        self._dropped: set[bytes] = set()
        """Contents of unloaded adapters that are still used, or have pages in common with others."""
        self._common = CommonPages()
        self._free_handles: list[int] = []  # a heap: handles stay small
        self._pinned: dict[Call, tuple[Int32, HostEntry]] = {}
        arbiter.register(owner, self, floor_pages=floor_pages)

    @property
    def residents(self) -> list[Resident]:
        """Those on the device, used or not."""
        return list(self._residents.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of pages that adapters keep, in any state."""
        return self._pool.counts(self._owner).total * self._page_bytes

    @property
    def _num_copying(self) -> int:
        return sum(load.stage is Stage.COPYING for load in self._loads.values())

    # ---- wishes ------------------------------------------------------------------------------------------------

    def want(self, version: AdapterVersion) -> Load:
        """Begin to load, or join the load that has begun. `unwant` when it is resident, failed, or not wanted."""
        load = self._loads.get(version)
        if load is None:
            load = self._loads[version] = Load(version, self._clock.now())
        load.num_wanted += 1
        return load

    def unwant(self, load: Load) -> None:
        """Undo one `want`. A load that nobody wants ends; its pages come back when no copy touches them."""
        load.num_wanted -= 1
        if load.num_wanted == 0:
            self._end(load)

    def find(self, version: AdapterVersion) -> Resident | None:
        """The resident of this content, if there is one."""
        return None if version.digest is None else self._residents.get(version.digest)

    # ---- use ---------------------------------------------------------------------------------------------------

    def hold(self, resident: Resident) -> None:
        """A choice uses it: it stays until `release`."""
        if not resident.num_users:
            self._pool.share(resident.own)
        if resident.base is not None:
            self.hold(resident.base)
        resident.num_users += 1
        self._arbiter.use(resident.unit)

    def release(self, resident: Resident) -> None:
        """Undo one `hold`."""
        resident.num_users -= 1
        if not resident.num_users:
            self._pool.free(resident.own)
            self._arbiter.offer(resident.unit)
        if resident.base is not None:
            self.release(resident.base)
        self._drop_unreachable()

    def forget(self, version: AdapterVersion) -> None:
        """Nobody can reach this version any more. Its content leaves all tiers, unless another version has it too."""
        digest = version.digest
        if digest is None or self._registry.versions_of(digest):
            return
        self._host.forget(digest)
        if digest in self._residents:
            self._dropped.add(digest)
            self._drop_unreachable()

    # ---- loading -----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Bring each load as far as it gets without pages. For every step."""
        self._drop_unreachable()
        num_opened = 0
        for load in list(self._loads.values()):
            if load.stage is Stage.RESIDENT and self.find(load.version) is None:
                load.stage = Stage.IDENTIFYING  # it was evicted before anybody held it
            is_open = load.version.state is VersionState.OPEN
            if load.stage is Stage.IDENTIFYING and (is_open or num_opened < MAX_OPENED):
                num_opened += not is_open
                self._identify(load)
            if load.stage is Stage.READING:
                self._watch_read(load)
            if load.stage is Stage.COPYING:
                self._watch_copies(load)

    def take(self, load: Load) -> bool:
        """Pages for a load that is READY, others evicted for them; then the copies begin. False without pages."""
        assert load.stage is Stage.READY, f"{load.version} takes pages while it is {load.stage.value}"
        assert load.entry is not None
        base, common = self._common.best(load.entry.page_digests)
        num_pages = load.version.num_pages - len(common)
        if base is not None and num_pages + base.num_held_pages > self._max_shared_pages:
            base, common, num_pages = None, {}, load.version.num_pages
        if len(self._residents) + self._num_copying >= MAX_ADAPTERS or num_pages > self._arbiter.num_available(
            self._owner
        ):
            return False
        if base is not None:
            self.hold(base)  # until the load ends; then its unit depends on that of the base
        try:
            if num_pages > self._pool.num_free:
                self._arbiter.reclaim(num_pages - self._pool.num_free, self._owner)
            own = self._pool.allocate(num_pages, self._owner)
        except OutOfPages:
            if base is not None:
                self.release(base)
            return False
        self._start_copies(load, own, common, base)
        return True

    def evict(self, unit: Unit) -> None:
        """Forget an adapter whose pages the arbiter takes."""
        assert isinstance(unit, AdapterUnit), "the arbiter took another owner's unit"
        resident = unit.resident
        assert not resident.num_users, "an adapter is evicted while it is used"
        self.num_evictions += 1
        self._unbind(resident)

    def check(self) -> None:
        """Raise AssertionError naming the broken law. O(pages)."""
        self._host.check()
        self._registry.check()
        users = np.zeros(self._pool.num_pages, np.int64)
        pins = np.zeros(self._pool.num_pages, np.int64)
        cached = np.zeros(self._pool.num_pages, bool)
        for resident in self._residents.values():
            users[resident.own] += resident.num_users > 0
            assert not cached[resident.own].any(), "two adapters own one page"
            assert len(resident.own), "an adapter owns no page"
            cached[resident.own] = True
            assert not resident.unit.is_gone, "a resident's unit is gone"
            if resident.base is not None:
                assert self._residents.get(resident.base.digest) is resident.base, "an adapter outlives its base"
                assert resident.base.num_users >= resident.num_users, "an adapter is used and its base is not"
                assert set(resident.pages) <= {*resident.own, *resident.base.pages}, "a page belongs to nobody"
        for load in self._loads.values():
            assert load.num_wanted > 0, f"{load.version} is loaded for nobody"
            if load.share is not None:
                users[load.share.own] += 1
        for pages, _ in self._pinned.values():
            pins[pages] += 1
        mine = self._pool.owner == self._owner
        assert np.array_equal(users[mine], self._pool.ref_count[mine]), "users of adapters and ref_counts disagree"
        assert np.array_equal(pins[mine], self._pool.pin_count[mine]), "copies in flight and pin_counts disagree"
        assert np.array_equal(cached & mine, self._pool.is_cached & mine), "residents and cached pages disagree"
        assert not users[~mine].any(), "an adapter uses a page of another owner"
        handles = sorted([resident.handle for resident in self._residents.values()] + self._free_handles)
        assert handles == list(range(len(handles))), "handles are not each owned once"

    # ---- steps of a load ---------------------------------------------------------------------------------------

    def _identify(self, load: Load) -> None:
        version = load.version
        if version.error is not None:
            error, version.error = version.error, None
            self._fail(load, error)
            return
        if not self._registry.open(version):
            return
        assert version.found is not None
        if version.digest is None:
            load.entry = self._host.hold(None, version.found)
            load.stage = Stage.READING
        elif self._brings(load, version.digest):
            load.entry = self._host.hold(version.digest, version.found)
            load.stage = Stage.READING

    def _brings(self, load: Load, digest: bytes) -> bool:
        """Whether it falls to this load to bring a content; else it is resident, or another load brings it."""
        self._dropped.discard(digest)
        if digest in self._residents:
            load.stage = Stage.RESIDENT
        elif digest in self._by_digest:
            load.stage = Stage.IDENTIFYING
        else:
            self._by_digest[digest] = load
            return True
        return False

    def _watch_read(self, load: Load) -> None:
        entry = load.entry
        assert entry is not None
        if entry.state is HostState.FAILED:
            assert entry.error is not None
            self._fail(load, entry.error)
        elif entry.state is HostState.READY and (load.version.digest is not None or self._learn(load, entry)):
            load.stage = Stage.READY

    def _learn(self, load: Load, entry: HostEntry) -> bool:
        """Now that its files were read, it is known what they hold. Whether the load can go on at once."""
        assert entry.digest is not None
        self._registry.learn(load.version, entry.digest)
        if not self._brings(load, entry.digest):
            load.entry = None
            self._host.release(entry)
            return False
        load.entry = self._host.settle(entry)
        return load.entry.state is HostState.READY

    def _start_copies(self, load: Load, own: Int32, common: dict[int, int], base: Resident | None) -> None:
        entry = load.entry
        assert entry is not None
        assert entry.images is not None
        pages = np.empty(load.version.num_pages, np.int32)
        is_own = np.ones(len(pages), bool)
        pages[list(common)], is_own[list(common)] = list(common.values()), False
        pages[is_own] = own
        load.share = PageShare(pages, own, base)
        self._pool.pin(own)
        images, at_once = np.flatnonzero(is_own).astype(np.int32), self._pages_at_once
        for first in range(0, len(own), at_once):
            some = own[first : first + at_once]
            self._host.share(entry)
            write = partial(_write, self._backend, some, entry.images, images[first : first + at_once], self._clock)
            call = self._copies.submit("a copy of an adapter into its pages", write, self._on_copied)
            self._pinned[call] = (some, entry)
            load.calls.append(call)
        load.stage = Stage.COPYING

    def _on_copied(self, call: Call) -> None:
        pages, entry = self._pinned.pop(call)
        self._pool.unpin(pages)
        if call.state is TaskState.DONE:
            self.rate.add(len(pages) * self._page_bytes, call.result)
        self._host.release(entry)

    def _watch_copies(self, load: Load) -> None:
        failed = next((c for c in load.calls if c.is_final and c.state is not TaskState.DONE), None)
        if failed is not None:
            self._fail(load, load_error(failed))
        elif all(call.is_final and call not in self._pinned for call in load.calls):
            self._make_resident(load)

    def _make_resident(self, load: Load) -> None:
        version, share, entry = load.version, load.share, load.entry
        assert share is not None
        assert entry is not None
        assert version.digest is not None
        assert version.found is not None
        size_bytes = version.found.adapter.size_bytes
        resident = Resident(version.digest, share, entry.page_digests, self._new_handle(), size_bytes)
        try:
            self._backend.bind_adapter(resident.handle, self._bind(version.found, share.pages))
        except Exception as error:  # a backend may refuse what it cannot run
            heapq.heappush(self._free_handles, resident.handle)
            self._fail(load, TransferFailed(f"the backend cannot bind `{version.name}`: {error}"))
            return
        load.share = None
        cost_s = self.rate.seconds(len(share.own) * self._page_bytes) + self._host.rate.seconds(entry.size_bytes)
        resident.unit = AdapterUnit(self._owner, resident, cost_s)
        self._residents[resident.digest] = resident
        self._common.add(resident)
        self._pool.cache(share.own.tolist())
        self._pool.free(share.own)
        self._arbiter.use(resident.unit)
        self._arbiter.offer(resident.unit)
        if share.base is not None:
            self.release(share.base)
        self.num_loads += 1
        self.load_seconds += self._clock.now() - load.started_s
        load.stage = Stage.RESIDENT
        self._let_go(load)

    def _new_handle(self) -> int:
        return heapq.heappop(self._free_handles) if self._free_handles else len(self._residents)

    def _fail(self, load: Load, error: KvartoError) -> None:
        self.num_failures += 1
        load.error = error
        load.stage = Stage.FAILED
        self._let_go(load)
        self._forget_load(load)

    def _end(self, load: Load) -> None:
        """Nobody wants it: resident, failed or abandoned."""
        if load.stage not in (Stage.RESIDENT, Stage.FAILED):
            self._let_go(load)
        self._forget_load(load)

    def _forget_load(self, load: Load) -> None:
        if self._loads.get(load.version) is load:
            del self._loads[load.version]

    def _let_go(self, load: Load) -> None:
        """Give back host entry and pages; what a copy still touches stays pinned."""
        digest = load.version.digest
        if digest is not None and self._by_digest.get(digest) is load:
            del self._by_digest[digest]
        for call in load.calls:
            self._copies.cancel(call)
        load.calls.clear()
        if load.share is not None:
            share, load.share = load.share, None
            self._pool.free(share.own)
            if share.base is not None:
                self.release(share.base)
        if load.entry is not None:
            self._host.release(load.entry)
            load.entry = None

    # ---- going -------------------------------------------------------------------------------------------------

    def _drop_unreachable(self) -> None:
        """Unloaded adapters leave, as soon as nobody uses them and nothing depends on them."""
        if not self._dropped:
            return
        self._dropped &= self._residents.keys()
        for resident in sorted((self._residents[digest] for digest in self._dropped), key=lambda each: -each.depth):
            if not resident.num_users:
                self._drop_resident(resident)

    def _drop_resident(self, resident: Resident) -> None:
        self._on_drop(resident.unit)
        if not resident.unit.num_dependents:  # else another adapter has pages in common with it
            self._dropped.discard(resident.digest)
            self._unbind(resident)
            self._arbiter.forget(resident.unit)
            self._pool.uncache(resident.own)

    def _unbind(self, resident: Resident) -> None:
        del self._residents[resident.digest]
        self._common.remove(resident)
        self._backend.unbind_adapter(resident.handle)
        heapq.heappush(self._free_handles, resident.handle)
        if self._poisons:
            poison = np.full((1, self._page_bytes), _POISON, np.uint8)
            self._backend.write_pages(resident.own, poison, np.zeros_like(resident.own))


def _write(backend: Backend, pages: Int32, images: NDArray[np.uint8], which: Int32, clock: Clock) -> float:
    """In a copy thread. Returns seconds."""
    start_s = clock.now()
    backend.write_pages(pages, images, which)
    return clock.now() - start_s
