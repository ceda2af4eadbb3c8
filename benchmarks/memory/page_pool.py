"""What does it cost to take and give back pages, natively and with array operations?

    python -m benchmarks.memory.page_pool

Ours: `allocate(n)` and `free`, of native loops. NumPy: the same states, counts and checks as gathers and scatters over
the same arrays, which is what the pool was before. A B A B, medians; the target is 10 us for a thousand pages. A pool
of 1,000,000 pages is started in a child process, which reports its growth in resident memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvarto.core.ids import OwnerId
from kvarto.memory.page_pool import PagePool

NUM_PAGES = 1_000_000
ROUNDS = 400
OWNER = OwnerId(0)
_UINT32 = np.dtype(np.uint32)
_INTP = np.dtype(np.intp)


class NumpyPool:
    """Allocation and free of unpinned pages by array operations."""

    def __init__(self, num_pages: int) -> None:
        self.free_stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.ref_count = np.zeros(num_pages, dtype=np.int32)
        self.pin_count = np.zeros(num_pages, dtype=np.int32)
        self.is_cached = np.zeros(num_pages, dtype=np.bool_)
        self.owner = np.full(num_pages, -1, dtype=np.int32)
        self.num_free = num_pages
        self.num_held = [0, 0]  # of all owners, and of the one

    def allocate(self, num_pages: int) -> NDArray[np.int32]:
        top = self.num_free
        assert num_pages <= top
        self.num_free = top - num_pages
        pages = self.free_stack[self.num_free : top][::-1].copy()
        self.ref_count[pages] = 1
        self.owner[pages] = 0
        self._count(num_pages)
        return pages

    def free(self, pages: NDArray[np.int32]) -> None:
        index = pages.view(_UINT32).astype(_INTP)
        counts = self.ref_count[index] - 1
        assert not np.count_nonzero(counts < 0)
        self.ref_count[index] = counts
        if np.count_nonzero(counts):
            index = index[counts == 0]
        self._count(-len(index))
        assert not np.count_nonzero(self.is_cached[index])
        assert not np.count_nonzero(self.pin_count[index])
        top = self.num_free + len(index)
        self.free_stack[self.num_free : top] = index[::-1]
        self.num_free = top
        self.owner[index] = -1

    def _count(self, num_pages: int) -> None:
        self.num_held = [count + num_pages for count in self.num_held]


def medians(ours: Callable[[], None], arrays: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of each, interleaved."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, times in zip((ours, arrays), samples, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(samples[0]) * 1e6, statistics.median(samples[1]) * 1e6


def cycle(pool: PagePool, num_pages: int) -> None:
    pool.free(pool.allocate(num_pages, OWNER))


def cycle_arrays(pool: NumpyPool, num_pages: int) -> None:
    pool.free(pool.allocate(num_pages))


def start_up() -> dict[str, float]:
    """Seconds and resident MiB of a pool of a million pages, in a fresh process."""
    code = (
        "import time, json\n"
        "from kvarto.memory.page_pool import PagePool\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before, start = rss(), time.perf_counter()\n"
        f"pool = PagePool({NUM_PAGES})\n"
        "start_ms = (time.perf_counter() - start) * 1e3\n"
        "fresh = rss() - before\n"
        f"pages = pool.allocate({NUM_PAGES}, 0); pool.pin(pages); pool.cache(pages.tolist()); del pages\n"
        "print(json.dumps(dict(start_ms=start_ms, fresh_mib=fresh / 2**20, used_mib=(rss() - before) / 2**20)))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def main() -> None:
    """Print the table."""
    ours, arrays = PagePool(NUM_PAGES), NumpyPool(NUM_PAGES)
    print(f"{'pages per call':>14} {'ours us':>9} {'numpy us':>9} {'speed-up':>9}")
    times: dict[str, tuple[float, float]] = {}
    for num_pages in (1, 16, 100, 1_000, 10_000):
        ours_us, numpy_us = medians(partial(cycle, ours, num_pages), partial(cycle_arrays, arrays, num_pages))
        times[str(num_pages)] = (round(ours_us, 2), round(numpy_us, 2))
        print(f"{num_pages:>14,} {ours_us:>9.2f} {numpy_us:>9.2f} {numpy_us / ours_us:>8.1f}x")
    ours.check()
    start = start_up()
    print(
        f"{NUM_PAGES:,} pages: start {start['start_ms']:.1f} ms, {start['fresh_mib']:.1f} MiB resident; "
        f"{start['used_mib']:.1f} MiB when every page was used, pinned and cached"
    )
    print(json.dumps({"benchmark": "memory.page_pool", "us": times, **{k: round(v, 2) for k, v in start.items()}}))


if __name__ == "__main__":
    main()
