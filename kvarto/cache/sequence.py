"""Sequence: the KV of one choice of one request. Its pages, and how far they are computed. State only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvarto.cache.entry import Entry
from kvarto.cache.page_copies import PageCopy
from kvarto.cache.turn import Turn
from kvarto.core.ids import NO_PAGE
from kvarto.memory.arbiter import Unit

Int32 = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """Made by `KVCache.open` and `fork`; only the cache changes it."""

    table: Int32
    """[num_groups, capacity]: page ids, NO_PAGE behind a window and past `num_pages`."""
    num_pages: int = 0
    """Columns of `table` in use: pages of one group, those behind a window counted."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the pages (or arrives with `copies`)."""
    num_cached_tokens: int = 0
    """Tokens that came from the prefix cache."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The computed tokens."""
    copies: list[PageCopy] = field(default_factory=list)
    """Copies into its pages that it has to wait for."""
    num_writable_tokens: int = 0
    """Up to here `grow` has nothing to do. 0 while unknown: after `open`, and after a fork."""
    may_share_tail: bool = False
    """The page that the next token goes to may have other users, and is copied before it is written."""
    next_event: int = 0
    """Computed tokens at which a match unit is complete or pages fall behind a window."""
    table_version: int = 0
    """Rises with every change of `table`, for those who keep copies of it."""
    num_behind: list[int] = field(default_factory=list)
    """For each part of the geometry: entries whose pages were given back behind the window."""
    is_open: bool = True

    root: Entry | None = None
    """Where its chain begins in the prefix index; None when nothing of it is cached."""
    turn: Turn | None = None
    """Where its chain leaves the base's; None where it is one chain from the root on."""
    is_attached: bool = False
    """What it computes becomes cached at once. Otherwise, since another computed the same first, when it closes."""
    prompt: bytes = b""
    """The tokens it was opened with."""
    digests: list[bytes] = field(default_factory=list)
    """Of its match units; may run ahead of the computed tokens, as far as the prompt."""
    entries: list[Entry] = field(default_factory=list)
    """Its whole entries in the index, from the first token. While attached it holds all their full-attention pages."""
    growing: Entry | None = None
    """The entry of the page that it fills, if that page is the one cached."""
    num_published_units: int = 0
    """Match units that the index was told of."""
    use: Unit | None = None
    """Where its use is counted: the last unit of its chain."""

    def page_table(self, group: int) -> Int32:
        """[num_pages]: page ids in order; NO_PAGE where nothing is kept. A view: valid until the next `grow`."""
        return self.table[group, : self.num_pages]

    @property
    def pages(self) -> Int32:
        """All pages that it holds, of all groups. Valid until the next `grow`: where nothing is behind a window it may
        be a view.
        """
        pages: Int32 = self.table[:, : self.num_pages].ravel()
        return pages[pages != NO_PAGE] if any(self.num_behind) else pages

    def reserve(self, num_pages: int) -> None:
        """Make room for `num_pages` columns, at least doubling."""
        num_groups, capacity = self.table.shape
        if num_pages > capacity:
            table = np.full((num_groups, max(num_pages, 2 * capacity)), NO_PAGE, dtype=np.int32)
            table[:, :capacity] = self.table
            self.table = table

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Computed tokens as the index compares them."""
        return self.tokens[start:stop].tobytes()
