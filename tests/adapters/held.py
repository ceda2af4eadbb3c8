"""Adapters whose arrays have their file with them; and what is packed and hashed, the slow and obvious way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter, LowRankUpdate
from kvarto.adapters.arrays import Bits, Bytes, Encoding, StoredArray
from kvarto.adapters.digest import content_digest, shape_digest
from kvarto.adapters.magnitudes import UpdateValues
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.packing import stream_order, strips_of
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.strip_codes import dequantise, quantise

Float32 = NDArray[np.float32]
HASHER = PageHasher(bytes(range(48)))
"""Digests of pages are comparable under one secret."""
ScaleOf = Callable[[LowRankUpdate], Float32]
_ENCODINGS = {np.dtype("<f4"): Encoding.F32, np.dtype("<f2"): Encoding.F16, np.dtype("<u2"): Encoding.BF16}


@dataclass(frozen=True, slots=True)
class HeldArray(StoredArray):
    """As `StoredArray`, with the file that it is read through."""

    file: Bytes | None = None

    def read(self, file: Bytes | None = None) -> Bits:
        assert self.file is not None
        return StoredArray.read(self, file or self.file)

    def values(self, file: Bytes | None = None) -> Float32:
        assert self.file is not None
        return StoredArray.values(self, file or self.file)


class MemoryFile:
    """Bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, size_bytes: int) -> bytes:
        part = self._data[offset : offset + size_bytes]
        assert len(part) == size_bytes
        return part


def array_of(values: NDArray[Any], name: str = "test") -> HeldArray:
    """float32, float16, or bits of bfloat16 as uint16."""
    return HeldArray(name, values.shape, _ENCODINGS[values.dtype], 0, file=MemoryFile(values.tobytes()))


def held(opened: OpenedAdapter) -> Adapter:
    """What was opened, with its values at hand."""
    file = opened.tensors_file

    def with_file(array: StoredArray | None) -> Any:
        if array is None:
            return None
        place = (array.name, array.shape, array.encoding, array.offset)
        return HeldArray(*place, array.is_transposed, array.num_permuted_heads, array.codes, file)

    updates = tuple(
        replace(u, lora_a=with_file(u.lora_a), lora_b=with_file(u.lora_b), bias=with_file(u.bias),
                magnitude=with_file(u.magnitude))
        for u in opened.adapter.updates
    )  # fmt: skip
    rows = tuple(replace(each, rows=with_file(each.rows)) for each in opened.adapter.token_rows)
    return replace(opened.adapter, updates=updates, token_rows=rows)


def update_values(update: LowRankUpdate) -> UpdateValues:
    """Of an update with a magnitude; of codes, what they stand for."""
    assert update.magnitude is not None
    a, b = stood_for(update.lora_a), stood_for(update.lora_b, has_columns=True)
    return UpdateValues(a, b, update.magnitude.values())


def page_images(adapter: Adapter, page_bytes: int, scale_of: ScaleOf | None = None) -> list[bytes]:
    """Each page in order: tensors in stream order, B by columns, what the last page does not hold is zero."""
    stream = _stream(adapter, scale_of)
    stream += bytes(-len(stream) % page_bytes)
    return [stream[start : start + page_bytes] for start in range(0, len(stream), page_bytes)]


def adapter_digest(adapter: Adapter, page_bytes: int, scale_of: ScaleOf | None = None) -> bytes:
    """What the content digest has to be, under the secret of `HASHER`."""
    images = page_images(adapter, page_bytes, scale_of)
    pages = HASHER.digests(np.frombuffer(b"".join(images), np.uint8).reshape(len(images), page_bytes))
    return content_digest(shape_digest(adapter), page_bytes, pages)


def _stream(adapter: Adapter, scale_of: ScaleOf | None) -> bytes:
    parts = list(_parts(adapter, scale_of))
    return b"".join(parts[index] for index in stream_order(strips_of(adapter)))


def _parts(adapter: Adapter, scale_of: ScaleOf | None) -> Iterator[bytes]:
    """One per entry of `strips_of`."""
    for update in adapter.updates:
        yield _packed(update.lora_a)
        yield _packed(update.lora_b, has_columns=True)
        if update.bias is not None:
            yield update.bias.read().tobytes()
        if update.magnitude is not None:
            assert scale_of is not None
            yield scale_of(update).astype(np.float32).tobytes()
    yield from (rows.rows.read().tobytes() for rows in adapter.token_rows)


def _packed(array: StoredArray, *, has_columns: bool = False) -> bytes:
    """Strips one after the other: rows, or columns."""
    if array.codes is None:
        return array.read().tobytes(order="F" if has_columns else "C")  # type: ignore[call-arg]
    values = array.values()  # type: ignore[call-arg]
    blocks = quantise(np.ascontiguousarray(values.T if has_columns else values), array.codes)
    assert blocks is not None
    return blocks.tobytes()


def stood_for(array: StoredArray, *, has_columns: bool = False) -> Float32:
    """The values as pages have them."""
    if array.codes is None:
        return array.values()  # type: ignore[call-arg]
    values = dequantise(np.frombuffer(_packed(array, has_columns=has_columns), np.uint8), array.codes)
    return values.reshape(array.shape[::-1]).T if has_columns else values.reshape(array.shape)
