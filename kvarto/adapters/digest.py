"""What an adapter is, as 256 bits: a function of what it does to its base, of no name, folder, file order or key order.

    adapter = blake2b(fields: version, then per update: target, rank, scaling, tensors; token rows; invocation tokens)
    tensor  = blake2b's fields: what it is, type and shape, and its bytes as the file has them

Prefix caches key KV by it, so an adapter that is loaded again under the same name with other weights never meets old
KV, and equal adapters under two names share pages. Computing it reads every byte, and finds values that are not finite.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import blake2b
from threading import Lock

import numpy as np

from kvarto.adapters.adapter import Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import LazyArray
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.pages import ScaleOf, page_images
from kvarto.core.digest_fields import DIGEST_BYTES, field, field_header
from kvarto.models.raw_file import FileIdentity

VERSION = b"1"
_PERSON = b"kvarto adapter"


def adapter_digest(adapter: Adapter) -> bytes:
    """32 bytes. Raises BadAdapter where a value is not finite or a file changed."""
    content = blake2b(field(b"V", VERSION), digest_size=DIGEST_BYTES, person=_PERSON)
    for update in adapter.updates:
        content.update(_update_fields(update))
        _add(content, b"A", update.lora_a)
        _add(content, b"B", update.lora_b)
        _add(content, b"C", update.bias)
        _add(content, b"M", update.magnitude)
    for rows in adapter.token_rows:
        content.update(_token_fields(rows))
        _add(content, b"R", rows.rows)
    content.update(field(b"I", _integers(adapter.invocation_tokens)))
    return content.digest()


def page_digests(adapter: Adapter, page_bytes: int, scale_of: ScaleOf | None = None) -> list[bytes]:
    """32 bytes per packed page, for tiers that check what they give back."""
    images = page_images(adapter, page_bytes, scale_of)
    return [blake2b(image, digest_size=DIGEST_BYTES).digest() for image in images]


class DigestCache:
    """Digests by the identity of the files they were computed from. One per base model; safe to use from threads.

    A digest is computed outside the lock: two threads may compute the same one. A file that changes meanwhile raises.
    """

    def __init__(self, max_entries: int = 1 << 16) -> None:
        self._max_entries = max_entries
        self._lock = Lock()
        self._digests: OrderedDict[tuple[FileIdentity, ...], bytes] = OrderedDict()

    def digest_of(self, opened: OpenedAdapter) -> bytes:
        """Known, or read and remembered."""
        key = tuple(file.identity for file in opened.files)
        with self._lock:
            if key in self._digests:
                self._digests.move_to_end(key)
                return self._digests[key]
        digest = adapter_digest(opened.adapter)
        with self._lock:
            self._digests[key] = digest
            while len(self._digests) > self._max_entries:
                self._digests.popitem(last=False)
        return digest


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
    )


def _token_fields(rows: TokenRows) -> bytes:
    roles, tokens = " ".join(rows.roles), _integers(rows.token_ids)
    return field(b"W", rows.weight.encode()) + field(b"O", roles.encode()) + field(b"T", tokens)


def _add(content: blake2b, tag: bytes, array: LazyArray | None) -> None:
    if array is None:
        return
    content.update(field(tag, array.dtype.encode()) + field(b"D", _integers(array.shape)))
    content.update(field_header(b"X", array.size_bytes))
    content.update(np.ascontiguousarray(array.read()).reshape(-1).view(np.uint8).data)


def _integers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
