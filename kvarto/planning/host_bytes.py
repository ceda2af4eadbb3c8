"""Bookkeeping outside the arena: what the plan adds to it for the machine's memory.

Tables, arrays and counts are there from the start; records of the prefix cache come with each page that is cached.
"""

from __future__ import annotations

from kvarto.core.buffers import StepLimits
from kvarto.core.units import ceil_div

POOL_BYTES_PER_PAGE = 17
"""Two counts, owner and free stack (int32), and a bit that takes a byte; see `kvarto.memory.page_pool`."""
CACHE_BYTES_PER_PAGE = 720
"""Prefix cache and arbiter, per cached page: digests, index entries, the unit to evict. Measured: 640 and allocator's
slack."""
CACHE_BYTES_PER_TOKEN = 12
"""Token ids and match-unit digests of a cached page, per token. Measured: 11 to 12."""
STEP_BYTES_PER_TOKEN = 4 + 4
"""Token id and position, int32; the slot of each group comes on top."""
SLOT_BYTES = 8
"""One entry of a slot mapping, int64."""
STEP_BYTES_PER_SAMPLE = 13 * 4 + 2 * 8
"""Sampling parameters and what sampling yields, without the ragged lists."""
PAGE_ID_BYTES = 4
"""int32."""


def page_table_bytes(num_groups: int, limits: StepLimits, page_size: int) -> int:
    """Page tables `[num_groups, max_seqs, max_pages]`: one in the cache, and one in the step that it is copied to."""
    max_pages = ceil_div(limits.max_context, page_size)
    return 2 * num_groups * limits.max_seqs * max_pages * PAGE_ID_BYTES


def step_bytes(num_groups: int, limits: StepLimits) -> int:
    """Flat arrays of one step at its largest."""
    per_token = STEP_BYTES_PER_TOKEN + num_groups * SLOT_BYTES
    return limits.max_tokens * per_token + limits.max_samples * STEP_BYTES_PER_SAMPLE


def host_bytes(num_groups: int, num_pages: int, limits: StepLimits, page_size: int) -> int:
    """What is there from the start: page tables, step arrays and the pool's arrays."""
    tables = page_table_bytes(num_groups, limits, page_size)
    return tables + step_bytes(num_groups, limits) + num_pages * POOL_BYTES_PER_PAGE


def record_bytes(num_pages: int, page_size: int) -> int:
    """Records of the prefix cache for that many cached pages."""
    return num_pages * (CACHE_BYTES_PER_PAGE + CACHE_BYTES_PER_TOKEN * page_size)
