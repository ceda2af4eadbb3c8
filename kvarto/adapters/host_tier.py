"""HostTier: packed adapters in host memory, between disk and pages. Bounded to the byte, and keyed by content.

Bytes are booked before a read begins and given back when no thread touches them any more: a read that was cancelled
while it ran keeps its bytes until it returns. What is held is never evicted; of the rest the least
`reload cost × frequency / size` goes first, with an age that rises, as in the arbiter. What is on its way may take
`staging_bytes` beyond a smaller capacity, and one adapter may always be, whatever its size: so a tier of 0 bytes keeps
nothing, and is a staging buffer.

The content of files that were never read is found out by their read: such an entry gets its digest with its bytes, and
where the tier has that content already, `settle` gives that one instead.

Knows contents and no names; one thread calls it, workers only read.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from kvarto.adapters.digest import Digests
from kvarto.adapters.host_entry import HostEntry, HostState
from kvarto.adapters.rate import Rate
from kvarto.adapters.source import FoundAdapter, Source, read_checked
from kvarto.adapters.spare_images import Images, SpareImages
from kvarto.core.clock import Clock
from kvarto.core.errors import AdapterError, KvartoError, TransferFailed
from kvarto.memory.calls import Call, Calls
from kvarto.memory.tasks import TaskState

MAX_READS = 4
"""At a time: the deadline of a read begins with it, so that a long queue makes none of them late."""
_FIRST_GUESS = 1e9
"""Bytes per second of reading and packing, before one was measured."""


class HostTier:
    """Holds what is being brought to the device, and keeps what there is room for."""

    def __init__(
        self,
        source: Source,
        calls: Calls,
        clock: Clock,
        *,
        capacity_bytes: int,
        page_bytes: int,
        staging_bytes: int = 0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.most_bytes = max(capacity_bytes, staging_bytes)
        """That may be used while some of it is on its way, unless one adapter alone takes more."""
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
        """By their content."""
        self._unknown: dict[HostEntry, None] = {}
        """Those whose content their read will tell."""
        self._waiting: deque[HostEntry] = deque()
        self._reading: list[HostEntry] = []
        self._num_leaving = 0
        self._age = 0.0
        self._spare = SpareImages()
        """Beside what is used, and within `most_bytes` with it."""

    def __contains__(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.state is HostState.READY

    def hold(self, digest: bytes | None, found: FoundAdapter) -> HostEntry:
        """The entry of this content, read when it is not there; without a digest, whatever is in these files is read.

        Whoever holds it watches its state.
        """
        entry = None if digest is None else self._entries.get(digest)
        if entry is None:
            entry = HostEntry(digest, found, found.num_pages * self.page_bytes)
            self._keep(entry)
            self._waiting.append(entry)
        elif entry.state is HostState.READY:
            self.num_hits += 1
        entry.num_holders += 1
        entry.frequency += 1
        entry.age = self._age
        self._begin_reads()
        return entry

    def settle(self, entry: HostEntry) -> HostEntry:
        """The entry to go on with, once an entry that was held without a digest is ready: another one, held in its
        place, where the tier had its content already.
        """
        assert entry.digest is not None, "an entry is settled before its content is known"
        if self._entries.get(entry.digest, entry) is entry:
            return entry
        known = self.hold(entry.digest, entry.found)
        self.release(entry)
        return known

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
            assert entry.digest is not None, "an entry is ready and its content unknown"
            if self._entries.get(entry.digest) is entry:
                self._trim()
            else:  # it was forgotten while it was held, or another has its content
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
        for entry in self._unknown:
            assert entry.digest is None, "an entry's content is known and not said"
            is_coming = entry.state in (HostState.WAITING, HostState.READING)
            assert is_coming, f"the content of an entry is unknown that is {entry.state}"
        entries = [*self._entries.values(), *self._unknown]
        for entry in entries:
            assert entry.state is not HostState.FAILED, "a failed entry is kept"
            assert entry.num_holders or entry.state is HostState.READY, f"nobody holds an entry that is {entry.state}"
            assert (entry.images is not None) == (entry.state is HostState.READY), "an entry is ready without images"
        mine = sum(entry.size_bytes for entry in entries if entry.state in (HostState.READING, HostState.READY))
        assert mine <= self.used_bytes, f"{mine} bytes are kept, {self.used_bytes} booked"
        if not self._num_leaving:
            most = max([self.most_bytes, *(entry.size_bytes for entry in entries)])
            assert self.used_bytes <= most, f"{self.used_bytes} bytes are used of {most}"
        spare = self._spare.size_bytes
        assert not spare or self.used_bytes + spare <= self.most_bytes, f"{spare} bytes are spare beside the used ones"
        assert self.used_bytes >= 0, f"{self.used_bytes} bytes are used"

    # ---- reading -----------------------------------------------------------------------------------------------

    def _begin_reads(self) -> None:
        while self._waiting and len(self._reading) < MAX_READS and self._make_room(self._waiting[0].size_bytes):
            entry = self._waiting.popleft()
            images = self._spare.take(entry.found.num_pages, self.page_bytes)
            self.used_bytes += entry.size_bytes
            self._spare.shrink(max(0, self.most_bytes - self.used_bytes))
            entry.state = HostState.READING
            read = partial(_read, self._source, entry.found, entry.digest, images, self._clock)
            entry.call = self._calls.submit("a read of an adapter", read, partial(self._on_settled, entry))
            self._reading.append(entry)

    def _take(self, entry: HostEntry) -> None:
        """The read has ended."""
        call, entry.call = entry.call, None
        assert call is not None
        self._reading.remove(entry)
        if call.state is TaskState.DONE:
            entry.images, digests, seconds = call.result
            entry.page_digests = digests.pages
            entry.state = HostState.READY
            if entry.digest is None:
                self._tell(entry, digests.content)
            self.num_reads += 1
            self.rate.add(entry.size_bytes, seconds)
            entry.reload_cost_s = seconds or self.rate.seconds(entry.size_bytes)
            return
        entry.state = HostState.FAILED
        entry.error = load_error(call)
        self._drop(entry)
        self._leave(call, entry)

    def _tell(self, entry: HostEntry, digest: bytes) -> None:
        """What is in its files is known now."""
        del self._unknown[entry]
        entry.digest = digest
        if digest in self._entries:
            self._num_leaving += 1  # as soon as nobody holds it
        else:
            self._entries[digest] = entry

    def _keep(self, entry: HostEntry) -> None:
        if entry.digest is None:
            self._unknown[entry] = None
        else:
            self._entries[entry.digest] = entry

    def _drop(self, entry: HostEntry) -> None:
        """Undo `_keep`."""
        if entry.digest is None:
            del self._unknown[entry]
        else:
            del self._entries[entry.digest]

    def _cancel(self, entry: HostEntry) -> None:
        self._drop(entry)
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
        while self.used_bytes and self.used_bytes + size_bytes > self.most_bytes:
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
        self._drop(victim)
        self._drop_images(victim)
        self.num_evictions += 1
        return True

    def _drop_images(self, entry: HostEntry) -> None:
        assert entry.images is not None, "an entry that is ready has no images"
        self._spare.give(entry.images)
        entry.images = None
        entry.state = HostState.GONE
        self.used_bytes -= entry.size_bytes
        self._spare.shrink(max(0, self.most_bytes - self.used_bytes))


def load_error(call: Call) -> KvartoError:
    """Why a call about an adapter failed: what it raised where that is about the adapter, else a TransferFailed."""
    if isinstance(call.raised, AdapterError):
        return call.raised
    return TransferFailed(f"{call.name} is {call.state}: {call.error}; try again")


def _read(
    source: Source, found: FoundAdapter, digest: bytes | None, images: Images, clock: Clock
) -> tuple[Images, Digests, float]:
    """In a worker thread: the pages, their digests, and the seconds that they took."""
    digests, seconds = read_checked(source, found, digest, images, np.arange(len(images), dtype=np.int32), clock)
    return images, digests, seconds
