"""PagedBytes: an adapter's stream where it lies, in pages that need not follow each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]


class PagedBytes:
    """Byte `i` is byte `i % page_bytes` of page `which[i // page_bytes]` of `images`, `[num_images, page_bytes]`."""

    def __init__(self, images: Bytes, which: Int32) -> None:
        self._images = images
        self._which = which.tolist()

    def read(self, start: int, size_bytes: int) -> Bytes:
        """A copy of `[start, start + size_bytes)`."""
        return np.concatenate(list(self._pieces(start, size_bytes)))

    def write(self, start: int, data: Bytes) -> None:
        """Put `data` there."""
        for piece in self._pieces(start, len(data)):
            piece[:], data = data[: len(piece)], data[len(piece) :]

    def _pieces(self, start: int, size_bytes: int) -> Iterator[Bytes]:
        """What lies in each page."""
        page_bytes = self._images.shape[1]
        end = start + size_bytes
        while start < end:
            page, offset = divmod(start, page_bytes)
            piece = self._images[self._which[page]][offset : offset + end - start]
            yield piece
            start += len(piece)
