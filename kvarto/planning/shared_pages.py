"""Pages that prompts with an equal beginning hold once, over a trace that names its prompts' blocks by id.

A block is `block_tokens` tokens of a prompt; equal ids mean an equal prompt up to the block's end. The full pages
inside a block are shared; the rest of a last, partial block is copied, as the server does. Pages that nobody holds
stay cached, and the block whose last user ended longest ago goes first, tails before heads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvarto.core.units import ceil_div
from kvarto.planning.allocation_policies import OWNER, Pages
from kvarto.planning.traces import Trace


@dataclass(slots=True)
class _Block:
    pages: NDArray[np.int32]
    num_users: int


class SharedPages(Pages):
    """Pages with a prefix cache. The trace must carry block ids, and `page_size` must divide a block."""

    def __init__(self, budget_bytes: int, token_bytes: int, page_size: int, trace: Trace) -> None:
        assert trace.block_ids is not None, "sharing needs to know which prompts are equal"
        assert trace.block_tokens % page_size == 0, "a page lies in one block"
        super().__init__(budget_bytes, token_bytes, page_size)
        self.name = f"pages of {page_size}, shared"
        self.num_queried_blocks = 0
        self.num_hit_blocks = 0
        self._counted: set[int] = set()
        self._trace = trace
        self._block_ids = _keys(trace)
        self._blocks: dict[int, _Block] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Blocks without users, the first to go in front."""

    @property
    def hit_fraction(self) -> float:
        """Share of prompt blocks that were found."""
        return self.num_hit_blocks / self.num_queried_blocks if self.num_queried_blocks else 0.0

    def admit(self, request: int, num_tokens: int, max_tokens: int, *, is_alone: bool) -> int | None:
        """Match the prompt, lock what matches, and take pages for the rest."""
        ids = self._block_ids[request]
        hits = list(takewhile(self._blocks.__contains__, ids))
        self._lock(hits)
        matched = [self._blocks[block_id].pages for block_id in hits]
        num_pages = ceil_div(num_tokens, self.page_size) - sum(map(len, matched))
        if num_pages + (0 if is_alone else self._headroom) > self.pool.num_free + self.pool.num_evictable:
            self._unlock(hits)
            return None
        self._evict(num_pages)
        for pages in (*matched, self.pool.allocate(num_pages, OWNER)):
            self._hold(request, pages)
        self._index(request, ids[len(hits) :])
        self._count(request, len(ids), len(hits))
        return ceil_div(num_tokens, self.page_size) * self.page_size

    def _count(self, request: int, num_blocks: int, num_hits: int) -> None:
        if request in self._counted:
            return  # came back after a preemption, and found its own pages
        self._counted.add(request)
        self.num_queried_blocks += num_blocks
        self.num_hit_blocks += num_hits

    def _lock(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            block = self._blocks[block_id]
            self.pool.share(block.pages)
            block.num_users += 1
            self._evictable.pop(block_id, None)

    def _unlock(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.pool.free(self._blocks[block_id].pages)
            self._leave(block_id)

    def _leave(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.num_users -= 1
        if not block.num_users:
            self._evictable[block_id] = None

    def _index(self, request: int, new_ids: list[int]) -> None:
        """Remember the blocks of the prompt that were computed now, by the full pages inside each."""
        pages = np.concatenate(self._tables[request])
        per_block = self._trace.block_tokens // self.page_size
        num_full_pages = int(self._trace.num_prompt_tokens[request]) // self.page_size
        first = len(self._block_ids[request]) - len(new_ids)
        for index, block_id in enumerate(new_ids, first):
            own = pages[index * per_block : min((index + 1) * per_block, num_full_pages)]
            self.pool.cache(own)
            self._blocks[block_id] = _Block(own, 1)

    def _evict(self, num_pages: int) -> None:
        victims: list[NDArray[np.int32]] = []
        missing = num_pages - self.pool.num_free
        while missing > 0:
            block_id, _ = self._evictable.popitem(last=False)
            victims.append(self._blocks.pop(block_id).pages)
            missing -= len(victims[-1])
        if victims:
            self.pool.uncache(np.concatenate(victims))

    def _room_for_growth(self, num_pages: int) -> int:
        self._evict(min(num_pages, self.pool.num_free + self.pool.num_evictable))
        return self.pool.num_free

    def release(self, request: int) -> None:
        """Give the pages back; blocks without users left stay cached."""
        super().release(request)
        for block_id in reversed(self._block_ids[request]):
            self._leave(block_id)

    def check(self) -> None:
        """Raise AssertionError naming the law that is broken."""
        self.pool.check()
        cached = sum(len(block.pages) for block in self._blocks.values() if not block.num_users)
        assert cached == self.pool.num_evictable, "pages of unused blocks are not the pool's evictable pages"
        unused = {block_id for block_id, block in self._blocks.items() if not block.num_users}
        assert set(self._evictable) == unused, "evictable blocks are not the unused ones"


def _keys(trace: Trace) -> list[list[int]]:
    """Ids of each prompt's blocks, those of partial blocks told apart by their length as well."""
    keys = [[block_id * trace.block_tokens for block_id in ids.tolist()] for ids in trace.block_ids or ()]
    for blocks, num_prompt_tokens in zip(keys, trace.num_prompt_tokens.tolist(), strict=True):
        blocks[-1] += num_prompt_tokens % trace.block_tokens
    return keys


def lru_hit_fraction(trace: Trace, num_blocks: int | None) -> float:
    """Share of prompt blocks found in a cache of `num_blocks` blocks (None: any number), one request at a time.

    A request touches its blocks from the last to the first, so a block never outlives the ones before it.
    """
    assert trace.block_ids is not None, "hits need to know which prompts are equal"
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_queries = 0
    for ids in trace.block_ids:
        blocks = ids.tolist()
        num_queries += len(blocks)
        num_hits += sum(1 for _ in takewhile(cache.__contains__, blocks))
        for block_id in reversed(blocks):
            cache[block_id] = None
            cache.move_to_end(block_id)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hits / num_queries if num_queries else 0.0
