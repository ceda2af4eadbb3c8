"""Where packed adapters go: pages in order, one page for all, or pages that need not follow each other."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.source import FoundAdapter
from kvarto.core import _native

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
UNTOUCHED = 0x5A


def in_order(found: FoundAdapter) -> Int32:
    """All pages of an array that holds nothing else."""
    return np.arange(found.num_pages, dtype=np.int32)


def pack_whole(
    plan: _native.adapters.PackPlan, isa: str, file: int, stream: Bytes, beside: Bytes, may_be_direct: bool
) -> tuple[tuple[int, bool] | None, int]:
    """Into a stream that is one page."""
    page_bytes, which = max(1, stream.nbytes), np.zeros(min(1, stream.nbytes), np.int32)
    return plan.pack(isa, file, stream, page_bytes, which, beside, may_be_direct)


class Scattered:
    """A region with more pages than a stream has, which has some of them in some order; some follow each other."""

    def __init__(self, rng: random.Random, num_pages: int, page_bytes: int) -> None:
        self.region = np.full((num_pages + 3, page_bytes), UNTOUCHED, np.uint8)
        ids = list(range(len(self.region)))
        cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(6)))
        runs = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        rng.shuffle(runs)
        self.which = np.array([page for run in runs for page in run][:num_pages], np.int32)

    def stream(self) -> bytes:
        """What was written, in order; nothing else was."""
        others = np.delete(self.region, self.which, axis=0)
        assert (others == UNTOUCHED).all(), "a page was written that belongs to somebody else"
        return self.region[self.which].tobytes()
