"""HostTier: packed adapters in host memory, between disk and pages. Bounded to the byte, and keyed by content.

    hold ──> waiting ── room ──> reading ── done ──> ready, held ⇄ ready, kept ── room is needed ──> gone
                │                   ├── fails ──> failed
                └──── released ─────┴───────────> gone

Bytes are booked before a read begins and given back when no thread touches them any more: a read that was cancelled
while it ran keeps its bytes until it returns. What is held is never evicted; of the rest the least
`reload cost × frequency / size` goes first, with an age that rises, as in the arbiter. One adapter may always be on its
way, however small the tier: so a tier of 0 bytes is a staging buffer for one.

Knows contents and no names; one thread calls it, workers only read.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.rate import Rate
from kvarto.adapters.source import FoundAdapter, Source, page_digests
from kvarto.core.clock import Clock
from kvarto.core.errors import AdapterError, KvartoError, TransferFailed
from kvarto.memory.calls import Call, Calls
from kvarto.memory.tasks import TaskState

Images = NDArray[np.uint8]
"""`[num_pages, page_bytes]`."""
MAX_READS = 4
"""At a time: the deadline of a read begins with it, so that a long queue makes none of them late."""
_FIRST_GUESS = 1e9
"""Bytes per second of reading and packing, before one was measured."""


class HostState(Enum):
    """See the drawing above."""

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


class HostEntry:
    """One adapter's pages in host memory. Only the tier changes it."""

    __slots__ = (
        "age",
        "call",
        "digest",
        "error",
        "found",
        "frequency",
        "images",
        "num_holders",
        "page_digests",
        "reload_cost_s",
        "size_bytes",
        "state",
    )

    def __init__(self, digest: bytes, found: FoundAdapter, size_bytes: int) -> None:
        self.digest = digest
        self.found = found
        self.size_bytes = size_bytes
        self.state = HostState.WAITING
        self.images: Images | None = None
        """While it is ready."""
        self.page_digests: tuple[bytes, ...] = ()
        """One per page, once it was read."""
        self.error: KvartoError | None = None
        """Why it failed."""
        self.num_holders = 0
        self.frequency = 0
        self.age = 0.0
        self.reload_cost_s = 0.0
        """Seconds that its read took."""
        self.call: Call | None = None

    @property
    def priority(self) -> float:
        """Least goes first."""
        return self.age + self.frequency * self.reload_cost_s / max(1, self.size_bytes)


class HostTier:
    """Holds what is being brought to the device, and keeps what there is room for."""

    def __init__(self, source: Source, calls: Calls, clock: Clock, *, capacity_bytes: int, page_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.page_bytes = page_bytes
        self.used_bytes = 0
        """Of all entries that have begun to read, gone ones included while a thread still writes to them."""
        self.num_reads = 0
        self.num_hits = 0
        self.num_evictions = 0
        self.rate = Rate(_FIRST_GUESS)
        self._source = source
        self._calls = calls
        self._clock = clock
        self._entries: dict[bytes, HostEntry] = {}
        self._waiting: deque[HostEntry] = deque()
        self._reading: list[HostEntry] = []
        self._num_leaving = 0
        self._age = 0.0

    def __contains__(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.state is HostState.READY

    def hold(self, digest: bytes, found: FoundAdapter) -> HostEntry:
        """The entry of this content, read when it is not there. Whoever holds it watches its state."""
        entry = self._entries.get(digest)
        if entry is None:
            entry = HostEntry(digest, found, found.num_pages * self.page_bytes)
            self._entries[digest] = entry
            self._waiting.append(entry)
        elif entry.state is HostState.READY:
            self.num_hits += 1
        entry.num_holders += 1
        entry.frequency += 1
        entry.age = self._age
        self._begin_reads()
        return entry

    def share(self, entry: HostEntry) -> None:
        """One more holder of an entry that is held."""
        assert entry.num_holders, "an entry is shared that nobody holds"
        entry.num_holders += 1

    def release(self, entry: HostEntry) -> None:
        """Undo one `hold`, in any state. What nobody waits for any more is not read."""
        entry.num_holders -= 1
        if entry.num_holders:
            return
        if entry.state is HostState.READY:
            if self._entries.get(entry.digest) is entry:
                self._trim()
            else:  # it was forgotten while it was held
                self._num_leaving -= 1
                self._drop_images(entry)
        elif entry.state in (HostState.WAITING, HostState.READING):
            self._cancel(entry)
        self._begin_reads()

    def forget(self, digest: bytes) -> None:
        """Its adapter was unloaded: leave as soon as nobody holds it."""
        entry = self._entries.get(digest)
        if entry is not None and entry.state is HostState.READY:
            del self._entries[digest]
            if entry.num_holders:
                self._num_leaving += 1
            else:
                self._drop_images(entry)
                self._begin_reads()

    def advance(self) -> None:
        """Take in what was read, and begin reads for which there is room. For every step."""
        for entry in [entry for entry in self._reading if entry.call is not None and entry.call.is_final]:
            self._take(entry)
        self._begin_reads()

    def check(self) -> None:
        """Raise AssertionError naming the broken law."""
        for digest, entry in self._entries.items():
            assert entry.digest == digest, "an entry is kept under another's digest"
            assert entry.state is not HostState.FAILED, "a failed entry is kept"
            assert entry.num_holders or entry.state is HostState.READY, f"nobody holds an entry that is {entry.state}"
            assert (entry.images is not None) == (entry.state is HostState.READY), "an entry is ready without images"
        mine = sum(e.size_bytes for e in self._entries.values() if e.state in (HostState.READING, HostState.READY))
        assert mine <= self.used_bytes, f"{mine} bytes are kept, {self.used_bytes} booked"
        largest = max((entry.size_bytes for entry in self._entries.values()), default=0)
        if not self._num_leaving:
            most = max(self.capacity_bytes, largest)
            assert self.used_bytes <= most, f"{self.used_bytes} bytes are used of {most}"
        assert self.used_bytes >= 0, f"{self.used_bytes} bytes are used"

    # ---- reading -----------------------------------------------------------------------------------------------

    def _begin_reads(self) -> None:
        while self._waiting and len(self._reading) < MAX_READS and self._make_room(self._waiting[0].size_bytes):
            entry = self._waiting.popleft()
            self.used_bytes += entry.size_bytes
            entry.state = HostState.READING
            read = partial(_read, self._source, entry.found, self.page_bytes, self._clock)
            entry.call = self._calls.submit("a read of an adapter", read, partial(self._on_settled, entry))
            self._reading.append(entry)

    def _take(self, entry: HostEntry) -> None:
        """The read has ended."""
        call, entry.call = entry.call, None
        assert call is not None
        self._reading.remove(entry)
        if call.state is TaskState.DONE:
            entry.images, entry.page_digests, seconds = call.result
            entry.state = HostState.READY
            self.num_reads += 1
            self.rate.add(entry.size_bytes, seconds)
            entry.reload_cost_s = seconds or self.rate.seconds(entry.size_bytes)
            return
        entry.state = HostState.FAILED
        entry.error = load_error(call)
        del self._entries[entry.digest]
        self._leave(call, entry)

    def _cancel(self, entry: HostEntry) -> None:
        del self._entries[entry.digest]
        if entry.state is HostState.WAITING:
            self._waiting.remove(entry)
        else:
            call, entry.call = entry.call, None
            assert call is not None
            self._reading.remove(entry)
            self._calls.cancel(call)
            self._leave(call, entry)
        entry.state = HostState.GONE

    def _leave(self, call: Call, entry: HostEntry) -> None:
        """Its bytes come back when the thread has let go of them; perhaps that was reported already."""
        call.result = None
        if call.on_settled is None:
            self.used_bytes -= entry.size_bytes
        else:
            self._num_leaving += 1
            call.on_settled = partial(self._on_left, entry)

    def _on_settled(self, entry: HostEntry, call: Call) -> None:
        """The thread has let go; what came of it is taken in by `advance`."""
        call.on_settled = None

    def _on_left(self, entry: HostEntry, call: Call) -> None:
        call.result = None
        self._num_leaving -= 1
        self.used_bytes -= entry.size_bytes

    # ---- room --------------------------------------------------------------------------------------------------

    def _make_room(self, size_bytes: int) -> bool:
        """Evict until so many more bytes fit; anything fits where nothing else is."""
        while self.used_bytes and self.used_bytes + size_bytes > self.capacity_bytes:
            if not self._evict_one():
                return False
        return True

    def _trim(self) -> None:
        while self.used_bytes > self.capacity_bytes and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        kept = [e for e in self._entries.values() if e.state is HostState.READY and not e.num_holders]
        victim = min(kept, key=lambda entry: entry.priority, default=None)
        if victim is None:
            return False
        self._age = max(self._age, victim.priority)
        del self._entries[victim.digest]
        self._drop_images(victim)
        self.num_evictions += 1
        return True

    def _drop_images(self, entry: HostEntry) -> None:
        entry.images = None
        entry.state = HostState.GONE
        self.used_bytes -= entry.size_bytes


def load_error(call: Call) -> KvartoError:
    """Why a call about an adapter failed: what it raised where that is about the adapter, else a TransferFailed."""
    if isinstance(call.raised, AdapterError):
        return call.raised
    return TransferFailed(f"{call.name} is {call.state}: {call.error}; try again")


def _read(
    source: Source, found: FoundAdapter, page_bytes: int, clock: Clock
) -> tuple[Images, tuple[bytes, ...], float]:
    """In a worker thread: the pages, their digests, and the seconds that they took."""
    start_s = clock.now()
    images = np.empty((found.num_pages, page_bytes), np.uint8)
    source.read(found, images)
    return images, page_digests(images), clock.now() - start_s
