"""What do the counts, owners and the law of the page pool cost, against the bare array operations below them?

    python -m benchmarks.memory.page_pool

Ours: `allocate(n)` and `free`. Bare: the same gathers and scatters over the same arrays, nothing counted or checked.
A B A B, medians. A pool of 1,000,000 pages is started in a child process, which reports its growth in resident memory.
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

from kvarto.core.ids import OwnerId
from kvarto.memory.page_pool import PagePool

NUM_PAGES = 1_000_000
ROUNDS = 400
OWNER = OwnerId(0)


class BarePool:
    """The array operations of an allocation and a free: what any pool with these arrays has to do."""

    def __init__(self, num_pages: int) -> None:
        self.free_stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.ref_count = np.zeros(num_pages, dtype=np.int32)
        self.pin_count = np.zeros(num_pages, dtype=np.int32)
        self.is_cached = np.zeros(num_pages, dtype=np.bool_)
        self.owner = np.full(num_pages, -1, dtype=np.int32)
        self.top = num_pages

    def cycle(self, num_pages: int) -> None:
        """Allocate and free. Indices are converted once, as a careful author would."""
        bottom = self.top - num_pages
        index = self.free_stack[bottom : self.top].astype(np.intp)
        self.ref_count[index] = 1
        self.owner[index] = 0
        self.ref_count[index] = self.ref_count[index] - 1
        self.pin_count[index]
        self.is_cached[index]
        self.owner[index] = -1
        self.free_stack[bottom : self.top] = index


def medians(ours: Callable[[], None], bare: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of each, interleaved."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, times in zip((ours, bare), samples, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(samples[0]) * 1e6, statistics.median(samples[1]) * 1e6


def cycle(pool: PagePool, num_pages: int) -> None:
    """Allocate and free."""
    pool.free(pool.allocate(num_pages, OWNER))


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
    ours, bare = PagePool(NUM_PAGES), BarePool(NUM_PAGES)
    print(f"{'pages per call':>14} {'ours us':>9} {'bare us':>9} {'ratio':>6}")
    ratios: dict[str, float] = {}
    for num_pages in (1, 16, 100, 1_000, 10_000):
        ours_us, bare_us = medians(partial(cycle, ours, num_pages), partial(bare.cycle, num_pages))
        ratios[str(num_pages)] = round(ours_us / bare_us, 2)
        print(f"{num_pages:>14,} {ours_us:>9.1f} {bare_us:>9.1f} {ours_us / bare_us:>6.2f}")
    ours.check()
    start = start_up()
    print(
        f"{NUM_PAGES:,} pages: start {start['start_ms']:.1f} ms, {start['fresh_mib']:.1f} MiB resident; "
        f"{start['used_mib']:.1f} MiB when every page was used, pinned and cached"
    )
    print(json.dumps({"benchmark": "memory.page_pool", "ratio": ratios, **{k: round(v, 2) for k, v in start.items()}}))


if __name__ == "__main__":
    main()
