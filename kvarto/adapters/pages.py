"""The bytes of an adapter's pages: tensors in stream order, as packing.py places them, B with one strip per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.packing import stream_order, strips_of

_Read = Callable[[], bytes]


def page_images(adapter: Adapter, page_bytes: int) -> Iterator[bytes]:
    """Each page in order; what the last one does not hold is zero.

    Reads every tensor once and holds one at a time. Raises BadAdapter where a value is not finite, or a file changed.
    """
    reads = list(_reads(adapter))
    held = bytearray()
    for index in stream_order(strips_of(adapter)):
        held += reads[index]()
        num_bytes = len(held) // page_bytes * page_bytes
        for start in range(0, num_bytes, page_bytes):
            yield bytes(held[start : start + page_bytes])
        del held[:num_bytes]
    if held:
        yield bytes(held) + bytes(page_bytes - len(held))


def _reads(adapter: Adapter) -> Iterator[_Read]:
    """One per entry of `strips_of`."""
    for update in adapter.updates:
        yield _rows(update.lora_a)
        yield _columns(update.lora_b)
        yield from (_rows(array) for array in (update.bias, update.magnitude) if array is not None)
    yield from (_rows(rows.rows) for rows in adapter.token_rows)


def _rows(array: LazyArray) -> _Read:
    return lambda: array.read().tobytes()


def _columns(array: LazyArray) -> _Read:
    return lambda: array.read().tobytes(order="F")
