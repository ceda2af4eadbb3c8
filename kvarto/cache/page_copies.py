"""PageCopies: copies between pages of the cache. Both ends stay pinned until no thread touches them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfer, Transfers


class PageCopy:
    """A copy that one sequence, or several after a fork, wait for."""

    __slots__ = ("num_waiters", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.num_waiters = 1

    @property
    def is_done(self) -> bool:
        """The target holds the source's bytes. Raises TransferFailed when it never will."""
        if self.transfer.is_final:
            self.transfer.require_done()
            return True
        return False


class PageCopies:
    """Starts, shares and abandons copies."""

    def __init__(self, pool: PagePool, transfers: Transfers) -> None:
        self._pool = pool
        self._transfers = transfers
        self._in_flight: dict[Transfer, None] = {}

    @property
    def in_flight(self) -> Iterable[Transfer]:
        """Those whose pages are still pinned."""
        return self._in_flight.keys()

    def start(self, source: int, target: int) -> PageCopy:
        """Copy a page. Its holder may let go of either page at any time."""
        transfer = self._transfers.submit(source, target, self._on_settled)
        self._pool.pin(np.array((source, target), dtype=np.int32))
        self._in_flight[transfer] = None
        return PageCopy(transfer)

    def share(self, copies: Iterable[PageCopy]) -> list[PageCopy]:
        """One more sequence waits for these copies."""
        shared = list(copies)
        for copy in shared:
            copy.num_waiters += 1
        return shared

    def abandon(self, copies: Iterable[PageCopy]) -> None:
        """A sequence does not wait any more; a copy that nobody waits for is cancelled."""
        for copy in copies:
            copy.num_waiters -= 1
            if copy.num_waiters == 0:
                self._transfers.cancel(copy.transfer)

    def poll(self) -> None:
        """Unpin the pages of copies that have ended."""
        self._transfers.poll()

    def _on_settled(self, transfer: Transfer) -> None:
        del self._in_flight[transfer]
        self._pool.unpin(np.array((transfer.source, transfer.target), dtype=np.int32))
