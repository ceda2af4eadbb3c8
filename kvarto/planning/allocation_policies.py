"""Ways to hold the KV of running requests in one budget, for `kvarto.planning.fragmentation` to compare.

    reservation   one contiguous range per request, sized when it starts, kept until it ends
    pages         pages as tokens come; the last page of a request is partly empty
    shared pages  the same, and prompts that begin alike hold those pages once; what nobody holds stays cached

Sizes are bytes; a request is its index in the trace. Pages come from the pool that serves real requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.core.ids import OwnerId
from kvarto.core.kv_format import PAGE_ALIGNMENT
from kvarto.core.units import align_up, ceil_div
from kvarto.memory.page_pool import PagePool
from kvarto.planning.allocators import ContiguousAllocator

TABLE_ENTRY_BYTES = 4
"""A page id in a page table."""
RANGE_BYTES = 16
"""Offset and length of a contiguous range."""
HEADROOM_FRACTION = 0.01
"""Share of the pool that admission leaves for the growth of those who run."""
OWNER = OwnerId(0)


class AllocationPolicy(Protocol):
    """Memory of running requests. `admit` and `grow` hold, `release` gives back."""

    name: str

    @property
    def held_bytes(self) -> int:
        """Bytes that running requests hold, each counted once."""
        ...

    @property
    def saved_bytes(self) -> int:
        """Bytes that would be held besides if nothing were shared."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds and nothing is cached in."""
        ...

    @property
    def cached_bytes(self) -> int:
        """Bytes kept for prompts to come, given up when needed."""
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes that say where the running requests' KV lies."""
        ...

    def can_serve(self, request: int, max_tokens: int) -> bool:
        """Whether a request that will hold `max_tokens` at its end could ever run."""
        ...

    def admit(self, request: int, num_tokens: int, max_tokens: int, *, is_alone: bool) -> int | None:
        """Hold memory for `num_tokens` now; how many tokens fit into it, or None when it does not fit."""
        ...

    def is_fragmented_for(self, request: int, num_tokens: int, max_tokens: int) -> bool:
        """Whether a refused request would fit if the free bytes were in one piece."""
        ...

    def grow(self, requests: Sequence[int]) -> int:
        """Hold room for more tokens, in order; how many of the requests got it."""
        ...

    def release(self, request: int) -> None:
        """Give back all that a request holds."""
        ...

    @property
    def growth_tokens(self) -> int:
        """Tokens of room that `grow` adds."""
        ...


class Reservation:
    """A contiguous range per request. `length_of(max_tokens)` says how many tokens it is for; None refuses."""

    growth_tokens = 0
    cached_bytes = 0
    saved_bytes = 0

    def __init__(
        self, name: str, allocator: ContiguousAllocator, token_bytes: int, length_of: Callable[[int], int | None]
    ) -> None:
        self.name = name
        self._allocator = allocator
        self._capacity_bytes = allocator.free_bytes
        self._token_bytes = token_bytes
        self._length_of = length_of
        self._offsets: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes in ranges."""
        return self._capacity_bytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self._allocator.free_bytes

    @property
    def table_bytes(self) -> int:
        """An offset and a length each."""
        return RANGE_BYTES * len(self._offsets)

    def _range_bytes(self, max_tokens: int) -> int:
        length = self._length_of(max_tokens)
        assert length is not None, "a request that can't be served was not refused"
        return length * self._token_bytes

    def can_serve(self, request: int, max_tokens: int) -> bool:
        """Whether the reserved length covers it and the whole budget covers that."""
        length = self._length_of(max_tokens)
        return length is not None and self._allocator.rounded(length * self._token_bytes) <= self._capacity_bytes

    def admit(self, request: int, num_tokens: int, max_tokens: int, *, is_alone: bool) -> int | None:
        """Reserve the whole length at once."""
        range_bytes = self._range_bytes(max_tokens)
        offset = self._allocator.allocate(range_bytes)
        if offset is None:
            return None
        self._offsets[request] = offset
        return self._allocator.rounded(range_bytes) // self._token_bytes

    def is_fragmented_for(self, request: int, num_tokens: int, max_tokens: int) -> bool:
        """Enough bytes are free, but not side by side."""
        return self._allocator.rounded(self._range_bytes(max_tokens)) <= self.free_bytes

    def grow(self, requests: Sequence[int]) -> int:
        """A reservation covers the whole output: nothing grows."""
        raise AssertionError("a reservation was too short for its request")

    def release(self, request: int) -> None:
        """Free the range."""
        self._allocator.free(self._offsets.pop(request))


class Pages:
    """Pages of `page_size` tokens as tokens come."""

    def __init__(self, budget_bytes: int, token_bytes: int, page_size: int) -> None:
        self.name = f"pages of {page_size}"
        self.page_size = page_size
        self.page_bytes = align_up(page_size * token_bytes, PAGE_ALIGNMENT)
        self.pool = PagePool(budget_bytes // self.page_bytes)
        self._num_pages = budget_bytes // self.page_bytes
        self._headroom = int(self._num_pages * HEADROOM_FRACTION)
        self._tables: dict[int, list[NDArray[np.int32]]] = {}
        self._num_entries = 0

    @property
    def growth_tokens(self) -> int:
        """A page's."""
        return self.page_size

    @property
    def held_bytes(self) -> int:
        """Pages in use."""
        return self.pool.num_held * self.page_bytes

    @property
    def saved_bytes(self) -> int:
        """Entries of page tables that name a page which another table names too."""
        return (self._num_entries - self.pool.num_held) * self.page_bytes

    @property
    def cached_bytes(self) -> int:
        """Pages that hold prompts of the past and nobody uses now."""
        return self.pool.num_evictable * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Free pages."""
        return self.pool.num_free * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """An entry per page of each running request."""
        return self._num_entries * TABLE_ENTRY_BYTES

    def can_serve(self, request: int, max_tokens: int) -> bool:
        """Whether the whole pool holds it."""
        return ceil_div(max_tokens, self.page_size) <= self._num_pages

    def admit(self, request: int, num_tokens: int, max_tokens: int, *, is_alone: bool) -> int | None:
        """Pages for the tokens that are there, leaving headroom for those who run."""
        num_pages = ceil_div(num_tokens, self.page_size)
        if num_pages + (0 if is_alone else self._headroom) > self.pool.num_free:
            return None
        self._hold(request, self.pool.allocate(num_pages, OWNER))
        return num_pages * self.page_size

    def is_fragmented_for(self, request: int, num_tokens: int, max_tokens: int) -> bool:
        """Any free page is as good as another."""
        return False

    def _hold(self, request: int, pages: NDArray[np.int32]) -> None:
        self._tables.setdefault(request, []).append(pages)
        self._num_entries += len(pages)

    def grow(self, requests: Sequence[int]) -> int:
        """One page each, in order, as far as they go."""
        count = min(len(requests), self._room_for_growth(len(requests)))
        pages = self.pool.allocate(count, OWNER)
        for request, page in zip(requests[:count], pages.reshape(-1, 1), strict=True):
            self._hold(request, page)
        return count

    def _room_for_growth(self, num_pages: int) -> int:
        return self.pool.num_free

    def release(self, request: int) -> None:
        """Give back every page of the table."""
        pages = np.concatenate(self._tables.pop(request))
        self._num_entries -= len(pages)
        self.pool.free(pages)
