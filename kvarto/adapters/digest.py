"""What an adapter is, as 256 bits: a function of what it does to its base, of no name, folder, file order or key order.

    shape   = blake3 of fields: version, then per update: target, rank, scaling, types, shapes; token rows; invocation
    page    = of its bytes, under a secret of the server: page_hasher.py
    adapter = blake3 of fields: shape, size of pages, pages in order

What pages hold (packing.py) is what steps compute with, so every byte is hashed once, for two purposes: equal pages are
known by their digests, equal adapters by the digest of those. It is a key inside of one server, whose engines share the
secret, and goes nowhere else: another server, pages of another size, or another base under its magnitudes give the
same files another digest.

Prefix caches key KV by it, so an adapter that is loaded again under the same name with other weights never meets old
KV, and equal adapters under two names share pages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvarto.adapters.adapter import Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import StoredArray
from kvarto.core.digest_fields import field

VERSION = b"4"
_SHAPE = "kvarto 2026 shape of an adapter"
_ADAPTER = "kvarto 2026 adapter"


@dataclass(frozen=True, slots=True)
class Digests:
    """Of what is in an adapter's pages."""

    content: bytes
    """Of the adapter."""
    pages: tuple[bytes, ...]


def shape_digest(adapter: Adapter) -> bytes:
    """32 bytes of all but the values."""
    shape = blake3(field(b"V", VERSION), derive_key_context=_SHAPE)
    for update in adapter.updates:
        shape.update(_update_fields(update))
    for rows in adapter.token_rows:
        shape.update(_token_fields(rows))
    shape.update(field(b"I", _integers(adapter.invocation_tokens)))
    return shape.digest()


def content_digest(shape: bytes, page_bytes: int, pages: Sequence[bytes]) -> bytes:
    """32 bytes, from the digests of all pages, under whose secret it is."""
    fields = field(b"F", shape) + field(b"Z", _integers((page_bytes,))) + field(b"P", b"".join(pages))
    return blake3(fields, derive_key_context=_ADAPTER).digest()


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
    return field(tag, array.strip_type.encode()) + field(b"D", _integers(array.shape))


def _integers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
