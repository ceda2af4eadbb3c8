"""Residency: adapters on the device, in the same pages as the KV cache.

    want ──> identifying ──> reading ──> ready ── take: pages ──> copying ── bind ──> resident
             registry        host tier            pool, arbiter   pinned              a unit of the arbiter
                        └───────────────> ready ── take: pages ──> filling ── bind ──> resident
                                                  pool, arbiter   pinned

Where pages are this machine's memory and the host tier keeps nothing, files are read into the pages themselves: to read
them elsewhere first would cost a copy and its memory. Then all pages are taken before it is known what the files hold;
those that a resident has already come back.

`want` begins when a request is queued and goes on in the background; `take` waits for whoever says that pages may be
taken. What is resident is held while a choice uses it. What nobody holds keeps its pages, as a unit that the arbiter
may take like any other: the KV that was computed with an adapter depends on its unit and goes before it. Names play no
part: two versions of equal content are one resident. Pages that are equal to those of a resident are not there twice:
whoever came later depends on it, and holds it along.

Threads write pages (page_writes.py), which are pinned until none touches them, also when nobody waits any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.common_pages import CommonPages
from kvarto.adapters.digest import Digests
from kvarto.adapters.host_entry import HostEntry, HostState
from kvarto.adapters.host_tier import HostTier, load_error
from kvarto.adapters.load import Load, Stage
from kvarto.adapters.page_writes import PageWrites
from kvarto.adapters.registry import AdapterVersion, Registry, VersionState
from kvarto.adapters.resident import AdapterUnit, PageShare, Resident
from kvarto.adapters.source import FoundAdapter
from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.clock import Clock
from kvarto.core.errors import KvartoError, OutOfPages, TransferFailed
from kvarto.core.ids import MAX_ADAPTERS, OwnerId
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.page_pool import PagePool
from kvarto.memory.tasks import TaskState
from kvarto.ops.base import Backend

Int32 = NDArray[np.int32]
Bind = Callable[[FoundAdapter, Int32], BoundAdapter]
"""From an adapter and its pages to what a backend needs."""

MAX_OPENED = 8
"""Adapters whose files are opened at a time: each of these calls has a deadline, which begins with it."""
_POISON = 0xFF
"""NaN in each type that adapters and KV have."""


class Residency:
    """The device tier; an evictor of the arbiter. One thread calls it."""

    def __init__(
        self,
        *,
        registry: Registry,
        host: HostTier,
        writes: PageWrites,
        pool: PagePool,
        arbiter: Arbiter,
        backend: Backend,
        bind: Bind,
        owner: OwnerId,
        clock: Clock,
        floor_pages: int = 0,
        max_shared_pages: int = 0,
        on_drop: Callable[[Unit], None] = lambda unit: None,
        poisons: bool = False,
    ) -> None:
        """`max_shared_pages`: an adapter that would hold more, with those that it has pages in common with, gets pages
        of its own instead; whoever runs alone must have room beside them. `on_drop` forgets all that depends on the
        unit of an adapter that was unloaded. `poisons`: pages that adapters leave are filled with NaN, for tests.
        """
        self.num_loads = 0
        self.num_hits = 0
        """Times that a choice found its adapter resident."""
        self.num_evictions = 0
        self.num_failures = 0
        self.load_seconds = 0.0
        """Of all loads, from the first wish to residency."""
        self._registry = registry
        self._host = host
        self._writes = writes
        self._pool = pool
        self._arbiter = arbiter
        self._backend = backend
        self._bind = bind
        self._owner = owner
        self._page_bytes = host.page_bytes
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
    def _num_coming(self) -> int:
        return sum(load.stage in (Stage.COPYING, Stage.FILLING) for load in self._loads.values())

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
            if load.stage in (Stage.COPYING, Stage.FILLING):
                self._watch_calls(load)

    def may_take(self, load: Load) -> bool:
        """Whether it is the turn of a load that is READY."""
        return load.entry is not None or self._writes.may_fill(load.version.num_pages)

    def take(self, load: Load) -> bool:
        """Pages for a load that is READY, others evicted for them; then they are filled. False without pages."""
        assert load.stage is Stage.READY, f"{load.version} takes pages while it is {load.stage.value}"
        base, common = (None, {}) if load.entry is None else self._shared(load)
        num_pages = load.version.num_pages - len(common)
        if len(self._residents) + self._num_coming >= MAX_ADAPTERS:
            return False
        if num_pages > self._arbiter.num_available(self._owner):
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
        load.share = _page_share(load.version.num_pages, own, common, base)
        if load.entry is None:
            assert load.version.found is not None
            load.calls = [self._writes.fill(load.version.found, load.version.digest, own)]
            load.stage = Stage.FILLING
        else:
            images = np.flatnonzero(np.isin(load.share.pages, own)).astype(np.int32)
            load.calls = self._writes.copy(load.entry, own, images)
            load.stage = Stage.COPYING
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
        for pages in self._writes.written():
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
        if version.digest is not None and not self._brings(load, version.digest):
            return
        if self._writes.reads_into_pages:
            load.stage = Stage.READY
        else:
            load.entry = self._host.hold(version.digest, version.found)
            load.stage = Stage.READING

    def _brings(self, load: Load, digest: bytes) -> bool:
        """Whether it falls to this load to bring a content; else it is resident, or another load brings it."""
        self._dropped.discard(digest)
        if digest in self._residents:
            load.stage = Stage.RESIDENT
        elif self._by_digest.get(digest, load) is not load:
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
        elif entry.state is HostState.READY and (load.version.digest is not None or self._learn_entry(load, entry)):
            assert load.entry is not None
            load.page_digests = load.entry.page_digests
            load.stage = Stage.READY

    def _learn_entry(self, load: Load, entry: HostEntry) -> bool:
        """Now that its files were read, it is known what they hold. Whether the load can go on at once."""
        assert entry.digest is not None
        if not self._learn(load, entry.digest):
            load.entry = None
            self._host.release(entry)
            return False
        load.entry = self._host.settle(entry)
        return load.entry.state is HostState.READY

    def _learn(self, load: Load, digest: bytes) -> bool:
        """Whether this load goes on with that content."""
        self._registry.learn(load.version, digest)
        return self._brings(load, digest)

    def _shared(self, load: Load) -> tuple[Resident | None, dict[int, int]]:
        """Whose pages a load uses, as far as it is known what it holds, and which, by their index in its stream."""
        base, common = self._common.best(load.page_digests)
        num_pages = load.version.num_pages - len(common)
        if base is None or num_pages + base.num_held_pages > self._max_shared_pages:
            return None, {}
        return base, common

    def _watch_calls(self, load: Load) -> None:
        failed = next((call for call in load.calls if call.is_final and call.state is not TaskState.DONE), None)
        if failed is not None:
            self._fail(load, load_error(failed))
        elif all(self._writes.is_done(call) for call in load.calls) and (
            load.stage is Stage.COPYING or self._has_filled(load, load.calls[0].result)
        ):
            self._make_resident(load)

    def _has_filled(self, load: Load, digests: Digests) -> bool:
        """Now that its pages hold what its files do; whether it is this load that brings it."""
        load.page_digests = digests.pages
        if load.version.digest is None and not self._learn(load, digests.content):
            load.calls.clear()
            self._give_back(load)
            return False
        self._share_filled(load)
        return True

    def _share_filled(self, load: Load) -> None:
        """Give pages back that a resident has too."""
        base, common = self._shared(load)
        if base is None:
            return
        assert load.share is not None
        self.hold(base)
        filled, is_own = load.share.own, np.ones(load.version.num_pages, bool)
        is_own[list(common)] = False
        self._pool.free(filled[~is_own])
        load.share = _page_share(load.version.num_pages, filled[is_own], common, base)

    def _make_resident(self, load: Load) -> None:
        version, share = load.version, load.share
        assert share is not None
        assert version.digest is not None
        assert version.found is not None
        size_bytes = version.found.adapter.size_bytes
        resident = Resident(version.digest, share, load.page_digests, self._new_handle(), size_bytes)
        try:
            self._backend.bind_adapter(resident.handle, self._bind(version.found, share.pages))
        except Exception as error:  # a backend may refuse what it cannot run
            heapq.heappush(self._free_handles, resident.handle)
            self._fail(load, TransferFailed(f"the backend cannot bind `{version.name}`: {error}"))
            return
        load.share = None
        cost_s = self._writes.fill_rate.seconds(version.num_pages * self._page_bytes)
        if load.entry is not None:
            cost_s += self._writes.copy_rate.seconds(len(share.own) * self._page_bytes)
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
            self._writes.cancel(call)
        load.calls.clear()
        self._give_back(load)
        if load.entry is not None:
            self._host.release(load.entry)
            load.entry = None

    def _give_back(self, load: Load) -> None:
        """The pages that a load has taken."""
        if load.share is None:
            return
        share, load.share = load.share, None
        self._pool.free(share.own)
        if share.base is not None:
            self.release(share.base)

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


def _page_share(num_pages: int, own: Int32, common: dict[int, int], base: Resident | None) -> PageShare:
    """`common`: pages of `base` by their index among `num_pages`; `own` are the others, in order."""
    pages, is_own = np.empty(num_pages, np.int32), np.ones(num_pages, bool)
    pages[list(common)], is_own[list(common)] = list(common.values()), False
    pages[is_own] = own
    return PageShare(pages, own, base)
