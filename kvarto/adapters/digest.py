"""What an adapter is, as 256 bits: a function of what it does to its base, of no name, folder, file order or key order.

    shape   = blake3 of fields: version, then per update: target, rank, scaling, types, shapes; token rows; invocation
    adapter = blake3 of fields: shape, stream, magnitudes

The stream is what pages hold (packing.py): the bytes of all tensors in an order that follows from the shape, whatever
the pages' size. A magnitude's place in it is zero here, since what stands there later is the base's work too; the
magnitudes are a field of their own, as the file has them.

Prefix caches key KV by it, so an adapter that is loaded again under the same name with other weights never meets old
KV, and equal adapters under two names share pages.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from threading import Lock

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import StoredArray
from kvarto.core.digest_fields import field, field_header
from kvarto.models.raw_file import FileIdentity

VERSION = b"2"
_SHAPE = "kvarto 2026 shape of an adapter"
_ADAPTER = "kvarto 2026 adapter"
_PAGE = "kvarto 2026 page of an adapter"

Bytes = NDArray[np.uint8]


def shape_digest(adapter: Adapter) -> bytes:
    """32 bytes of all but the values."""
    shape = blake3(field(b"V", VERSION), derive_key_context=_SHAPE)
    for update in adapter.updates:
        shape.update(_update_fields(update))
    for rows in adapter.token_rows:
        shape.update(_token_fields(rows))
    shape.update(field(b"I", _integers(adapter.invocation_tokens)))
    return shape.digest()


def content_digest(shape: bytes, stream: Bytes, magnitudes: Bytes) -> bytes:
    """32 bytes. `stream` without the zeros of the last page, `magnitudes` as a `Packer` has them."""
    content = blake3(field(b"F", shape) + field_header(b"X", stream.size), derive_key_context=_ADAPTER)
    content.update(stream.data)
    content.update(field_header(b"M", magnitudes.size))
    content.update(magnitudes.data)
    return content.digest()


def page_digests(images: Bytes) -> tuple[bytes, ...]:
    """32 bytes for each of `[num_pages, page_bytes]`: equal pages are known by them."""
    return tuple(blake3(image.data, derive_key_context=_PAGE).digest() for image in images)


class DigestCache:
    """Digests by the identity of the files they were computed from. One per base model; safe to use from threads."""

    def __init__(self, max_entries: int = 1 << 16) -> None:
        self._max_entries = max_entries
        self._lock = Lock()
        self._digests: OrderedDict[tuple[FileIdentity, ...], bytes] = OrderedDict()

    def get(self, files: tuple[FileIdentity, ...]) -> bytes | None:
        """What was put there, if it is still known."""
        with self._lock:
            if files not in self._digests:
                return None
            self._digests.move_to_end(files)
            return self._digests[files]

    def put(self, files: tuple[FileIdentity, ...], digest: bytes) -> None:
        """Remember what these files hold."""
        with self._lock:
            self._digests[files] = digest
            while len(self._digests) > self._max_entries:
                self._digests.popitem(last=False)


def _update_fields(update: LowRankUpdate) -> bytes:
    target = update.target
    sizes = _integers((target.first_row, target.out_width, target.in_width, update.rank))
    # Zero has two signs, and scales alike with both.
    scaling = struct.pack("<d", update.scaling + 0.0)
    return (
        field(b"U", target.weight.encode())
        + field(b"O", target.role.encode())
        + field(b"N", sizes)
        + field(b"S", scaling)
        + _array_fields(b"A", update.lora_a)
        + _array_fields(b"B", update.lora_b)
        + _array_fields(b"C", update.bias)
        + _array_fields(b"M", update.magnitude)
    )


def _token_fields(rows: TokenRows) -> bytes:
    roles, tokens = " ".join(rows.roles), _integers(rows.token_ids)
    fields = field(b"W", rows.weight.encode()) + field(b"O", roles.encode()) + field(b"T", tokens)
    return fields + _array_fields(b"R", rows.rows)


def _array_fields(tag: bytes, array: StoredArray | None) -> bytes:
    if array is None:
        return b""
    return field(tag, array.dtype.encode()) + field(b"D", _integers(array.shape))


def _integers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
