"""The bytes of an adapter's pages: tensors in stream order, as packing.py places them, B with one strip per rank.

Of a magnitude m (DoRA), pages do not hold m itself but what rows are multiplied with, g = m / |W + scaling B A|: it
needs the base's weights, so whoever has them gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter, LowRankUpdate
from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.packing import stream_order, strips_of

ScaleOf = Callable[[LowRankUpdate], NDArray[np.float32]]
"""From an update with a magnitude to its g, `[out]`."""
_Read = Callable[[], bytes]


def page_images(adapter: Adapter, page_bytes: int, scale_of: ScaleOf | None = None) -> Iterator[bytes]:
    """Each page in order; what the last one does not hold is zero. `scale_of` is needed where there are magnitudes.

    Reads every tensor once and holds one at a time. Raises BadAdapter where a value is not finite, or a file changed.
    """
    reads = list(_reads(adapter, scale_of))
    held = bytearray()
    for index in stream_order(strips_of(adapter)):
        held += reads[index]()
        num_bytes = len(held) // page_bytes * page_bytes
        for start in range(0, num_bytes, page_bytes):
            yield bytes(held[start : start + page_bytes])
        del held[:num_bytes]
    if held:
        yield bytes(held) + bytes(page_bytes - len(held))


def _reads(adapter: Adapter, scale_of: ScaleOf | None) -> Iterator[_Read]:
    """One per entry of `strips_of`."""
    for update in adapter.updates:
        yield _rows(update.lora_a)
        yield _columns(update.lora_b)
        if update.bias is not None:
            yield _rows(update.bias)
        if update.magnitude is not None:
            assert scale_of is not None, "an adapter with magnitudes needs the base to be packed"
            yield _scale(update, scale_of)
    yield from (_rows(rows.rows) for rows in adapter.token_rows)


def _rows(array: LazyArray) -> _Read:
    return lambda: array.read().tobytes()


def _columns(array: LazyArray) -> _Read:
    return lambda: array.read().tobytes(order="F")


def _scale(update: LowRankUpdate, scale_of: ScaleOf) -> _Read:
    def read() -> bytes:
        scale = scale_of(update)
        assert scale.dtype == np.float32, "what rows are multiplied with is float32"
        assert scale.shape == (update.target.out_width,), f"{scale.shape} for {update.target}"
        return scale.tobytes()

    return read
