"""PageWrites: threads that fill pages of the device with adapters, and what stays until they have let go.

    copy:  images in host memory ──> pages     the host's entry is held
    fill:  files ──────────────────> pages     where these are memory of this machine

Pages are pinned meanwhile, also when nobody waits for them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.digest import Digests
from kvarto.adapters.host_entry import HostEntry
from kvarto.adapters.host_tier import MAX_READS, HostTier
from kvarto.adapters.rate import Rate
from kvarto.adapters.source import FoundAdapter, Source, read_checked
from kvarto.core.clock import Clock
from kvarto.memory.calls import Call, Calls
from kvarto.memory.page_pool import PagePool
from kvarto.memory.tasks import TaskState
from kvarto.ops.base import Backend

Int32 = NDArray[np.int32]

COPY_BYTES = 8 << 20
"""Filled by one call: a few milliseconds of copying, so that calls cost little and end soon."""
FILL_BYTES = 256 << 20
"""On their way from files to pages at a time, unless one adapter alone takes more: the deadline of a read begins with
it, so that a line of large adapters makes none of them late."""
_FIRST_GUESS = 4e9
"""Bytes per second from host memory into pages, before they were measured."""


class PageWrites:
    """Calls that write pages. One thread calls it."""

    def __init__(
        self,
        *,
        source: Source,
        host: HostTier,
        pool: PagePool,
        backend: Backend,
        reads: Calls,
        copies: Calls,
        clock: Clock,
        copy_bytes: int = COPY_BYTES,
        fill_bytes: int = FILL_BYTES,
    ) -> None:
        """`copy_bytes`: of pages that are filled by one copy, at least one page; `fill_bytes`: see `FILL_BYTES`."""
        self.copy_rate = Rate(_FIRST_GUESS)
        self.fill_rate = host.rate
        """Of reading and packing, wherever it goes."""
        self._source = source
        self._host = host
        self._pool = pool
        self._backend = backend
        self._reads = reads
        self._copies = copies
        self._clock = clock
        self._page_bytes = host.page_bytes
        self._pages_at_once = max(1, copy_bytes // host.page_bytes)
        self._most_filling_pages = fill_bytes // host.page_bytes
        self._pages: dict[Call, Int32] = {}
        """That calls write."""
        self._entries: dict[Call, HostEntry] = {}
        """That calls copy."""

    @property
    def reads_into_pages(self) -> bool:
        """Whether files are read into pages at once: these are host memory too, and the host tier keeps nothing."""
        return not self._host.capacity_bytes and self._backend.host_pages() is not None

    @property
    def num_filling(self) -> int:
        """Reads into pages that have not let go of them."""
        return len(self._pages) - len(self._entries)

    def may_fill(self, num_pages: int) -> bool:
        """Whether it is the turn of so many pages: files are read into them a few at a time, those aside whose deadline
        has passed.
        """
        now_s, calls = self._clock.now(), self._pages.keys() - self._entries.keys()
        filling = [len(self._pages[call]) for call in calls if call.deadline_s > now_s]
        return not filling or (len(filling) < MAX_READS and sum(filling) + num_pages <= self._most_filling_pages)

    def is_done(self, call: Call) -> bool:
        """Whether all is written and no thread touches it any more."""
        return call.state is TaskState.DONE and call not in self._pages

    def copy(self, entry: HostEntry, pages: Int32, images: Int32) -> list[Call]:
        """Images of an entry that is held go to pages, `entry.images[images[i]]` to `pages[i]`."""
        assert entry.images is not None, "an entry is copied that is not ready"
        self._pool.pin(pages)
        calls = []
        for first in range(0, len(pages), self._pages_at_once):
            some, of = (ids[first : first + self._pages_at_once] for ids in (pages, images))
            self._host.share(entry)
            write = partial(_write, self._backend, some, entry.images, of, self._clock)
            call = self._copies.submit("a copy of an adapter into its pages", write, self._on_copied)
            self._pages[call], self._entries[call] = some, entry
            calls.append(call)
        return calls

    def fill(self, found: FoundAdapter, digest: bytes | None, pages: Int32) -> Call:
        """Read an adapter's files into pages; the call's result are its digests. It fails where `digest` is another."""
        self._pool.pin(pages)
        read = partial(_read, self._source, found, digest, self._backend, pages, self._clock)
        call = self._reads.submit("a read of an adapter into its pages", read, self._on_filled)
        self._pages[call] = pages
        return call

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more."""
        (self._copies if call in self._entries else self._reads).cancel(call)

    def written(self) -> Iterator[Int32]:
        """Pages of each call, for checks."""
        return iter(self._pages.values())

    def _on_copied(self, call: Call) -> None:
        pages, entry = self._pages.pop(call), self._entries.pop(call)
        self._pool.unpin(pages)
        if call.state is TaskState.DONE:
            self.copy_rate.add(len(pages) * self._page_bytes, call.result)
        self._host.release(entry)

    def _on_filled(self, call: Call) -> None:
        pages = self._pages.pop(call)
        self._pool.unpin(pages)
        if call.state is TaskState.DONE:
            call.result, seconds = call.result
            self.fill_rate.add(len(pages) * self._page_bytes, seconds)


def _write(backend: Backend, pages: Int32, images: NDArray[np.uint8], which: Int32, clock: Clock) -> float:
    """In a thread that copies. Returns seconds."""
    start_s = clock.now()
    backend.write_pages(pages, images, which)
    return clock.now() - start_s


def _read(
    source: Source, found: FoundAdapter, digest: bytes | None, backend: Backend, pages: Int32, clock: Clock
) -> tuple[Digests, float]:
    """In a thread that reads. Returns seconds too."""
    images = backend.host_pages()
    assert images is not None, "pages lie elsewhere"
    return read_checked(source, found, digest, images, pages, clock)
