"""SpareImages: memory that the system has given already, for the next adapter of the same size.

A fresh block costs as much time as it takes to read and pack an adapter: small pages in faults, huge ones in zeros that
the system writes into them. Adapters of one recipe have one size, and come one after the other.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
"""`[num_pages, page_bytes]`."""

MOST_BYTES = 64 << 20
"""Three adapters of 20 MB: one that is read, one that is packed, one that is copied."""


_LINE_BYTES = 64
"""Of the cache. The packer is fastest where its lines are those of pages."""


def new_images(num_pages: int, page_bytes: int) -> Images:
    """A fresh block that holds anything; it begins with a cache line."""
    padded = np.empty(num_pages * page_bytes + _LINE_BYTES, np.uint8)
    start = -padded.ctypes.data % _LINE_BYTES
    return padded[start : start + num_pages * page_bytes].reshape(num_pages, page_bytes)


class SpareImages:
    """Blocks that nobody uses, those used last at hand. One thread calls it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size_bytes = 0
        """Of all that are kept."""
        self._most_bytes = most_bytes
        self._blocks: deque[Images] = deque()

    def take(self, num_pages: int, page_bytes: int) -> Images:
        """A block that holds anything: a spare one of this size, or a new one."""
        for index in range(len(self._blocks) - 1, -1, -1):
            block = self._blocks[index]
            if block.shape == (num_pages, page_bytes):
                del self._blocks[index]
                self.size_bytes -= block.nbytes
                return block
        return new_images(num_pages, page_bytes)

    def give(self, block: Images) -> None:
        """Nobody refers to its bytes any more."""
        self._blocks.append(block)
        self.size_bytes += block.nbytes
        self.shrink(self._most_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Give memory back to the system, what was used least recently first, until no more than so much is kept."""
        while self._blocks and self.size_bytes > most_bytes:
            self.size_bytes -= self._blocks.popleft().nbytes
