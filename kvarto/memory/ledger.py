"""Ledger: the owner of every byte of the arena. Dashboard, metrics, error messages and leak checks read it.

    arena = weights | activations | pages
                                    pages = free + for each owner: held + evictable + draining

It keeps names, and no second count: bytes of the fixed regions come from the layout, pages from the pool.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum

from kvarto.core.ids import OwnerId
from kvarto.core.layout import Layout
from kvarto.core.units import format_bytes
from kvarto.memory.page_pool import PagePool


class OwnerKind(StrEnum):
    """What an owner keeps in pages; a label of metrics, so that there are few."""

    KV = "kv"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who takes pages."""

    name: str
    kind: OwnerKind


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of one region, kind of owner and state."""

    region: str
    """`weights`, `activations` or `pages`."""
    kind: str
    """An `OwnerKind`, `free`, or the region's own name where it is one piece."""
    state: str
    """`fixed`, `free`, `held`, `evictable` or `draining`."""
    size_bytes: int


class Ledger:
    """Owners by name and kind, and where the bytes are."""

    def __init__(self, layout: Layout, pool: PagePool) -> None:
        assert pool.num_pages == layout.num_pages, f"{pool.num_pages} pages in the pool, {layout.num_pages} laid out"
        self._layout = layout
        self._pool = pool
        self._owners: dict[OwnerId, Owner] = {}
        self._retired: list[OwnerId] = []  # a heap: ids stay small, and the pool's list of owners short

    @property
    def owners(self) -> dict[OwnerId, Owner]:
        """All owners, by id; a copy."""
        return dict(self._owners)

    def register(self, name: str, kind: OwnerKind) -> OwnerId:
        """A new owner, to take pages with. Its id may have been another's, who retired."""
        owner = heapq.heappop(self._retired) if self._retired else OwnerId(len(self._owners))
        self._owners[owner] = Owner(name, kind)
        return owner

    def retire(self, owner: OwnerId) -> None:
        """Forget an owner who has given all pages back."""
        num_pages = self._pool.counts(owner).total
        assert num_pages == 0, f"{self._owners[owner]} retires with {num_pages} pages"
        del self._owners[owner]
        heapq.heappush(self._retired, owner)

    def owner_bytes(self, owner: OwnerId) -> int:
        """Bytes of the pages that one owner keeps, in any state."""
        return self._pool.counts(owner).total * self._page_bytes

    def rows(self) -> list[LedgerRow]:
        """Every byte of the arena in one row; kinds and states without bytes are there too. O(owners)."""
        fixed = [self._layout.weights, self._layout.activations]
        rows = [LedgerRow(region.name, region.name, "fixed", region.size_bytes) for region in fixed]
        rows.append(LedgerRow("pages", "free", "free", self._pool.num_free * self._page_bytes))
        for kind in OwnerKind:
            counts = [self._pool.counts(owner) for owner, each in self._owners.items() if each.kind is kind]
            for state in ("held", "evictable", "draining"):
                num_pages = sum(getattr(each, state) for each in counts)
                rows.append(LedgerRow("pages", kind, state, num_pages * self._page_bytes))
        return rows

    def region_bytes(self) -> dict[str, int]:
        """Bytes by `weights`, `activations`, `pages_free` and `pages_<kind>`; they add up to the arena."""
        sizes: dict[str, int] = {}
        for row in self.rows():
            key = f"{row.region}_{row.kind}" if row.region == "pages" else row.region
            sizes[key] = sizes.get(key, 0) + row.size_bytes
        return sizes

    def table(self) -> str:
        """The rows that have bytes, as plain text."""
        rows = [row for row in self.rows() if row.size_bytes]
        cells = [(row.region, row.kind, row.state, row.size_bytes) for row in rows]
        cells.append(("arena", "", "", sum(row.size_bytes for row in rows)))
        return "\n".join(
            f"{region:<11}  {kind:<11}  {state:<9}  {size_bytes:>19,}  {format_bytes(size_bytes):>11}"
            for region, kind, state, size_bytes in cells
        )

    def check(self) -> None:
        """Raise AssertionError naming the broken law: the owners we know account for every byte of the arena."""
        total_bytes = sum(row.size_bytes for row in self.rows())
        assert total_bytes == self._layout.total_bytes, (
            f"owners account for {total_bytes} bytes of an arena of {self._layout.total_bytes}:\n{self.table()}"
        )

    @property
    def _page_bytes(self) -> int:
        return self._layout.kv_format.page_bytes
