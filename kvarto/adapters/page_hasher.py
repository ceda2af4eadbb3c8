"""PageHasher: digests by which equal pages are known, made as fast as memory is read. A secret is what makes them safe.

    value  = POLYVAL of the page's blocks at a secret point      RFC 8452, section 3; native/ops/page_hash.h
    digest = blake3 of value and length, with a secret key       values would give the point away

This is an almost universal hash (Carter and Wegman, "Universal classes of hash functions", 1979): two different pages
of n blocks of 16 bytes have equal values at no more than n of the 2^128 points. So all of N pages, whoever made them,
are told apart but with a probability of N^2 n / 2^129, which is 2^-71 for a million pages of 4 MiB. To see which ones
were taken for equal helps nobody who makes others: before the first mistake, that follows from the pages alone.

But whoever knows the point makes pages of equal value at will. So it is drawn at random, with the key, for the life of
a server; both stay inside of it and its engines, and so does every digest: no other process could compare one, and
nobody should have any to try keys on.

Without a carry-less multiplication (the portable instruction set) a digest is blake3 of the page, with the same key.
"""

from __future__ import annotations

import secrets

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvarto.core import _native
from kvarto.core.digest_fields import PAGE_KEY_BYTES
from kvarto.ops.native.isa import choose_isa

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]

_POINT_BYTES = 16
_VALUE_BYTES = 16
_LENGTH_BYTES = 8


class PageHasher:
    """Digests of pages under one secret. Safe to use from threads."""

    def __init__(self, key: bytes | None = None, *, isa: str | None = None) -> None:
        """`key`: `PAGE_KEY_BYTES` secret bytes, random ones without it. `isa`: whose instructions multiply."""
        key = secrets.token_bytes(PAGE_KEY_BYTES) if key is None else key
        assert len(key) == PAGE_KEY_BYTES, f"a key of {len(key)} bytes"
        self._point, self._key = key[:_POINT_BYTES], key[_POINT_BYTES:]
        self._isa = isa or choose_isa()
        self.algorithm = "POLYVAL" if _native.adapters.can_hash_pages(self._isa) else "BLAKE3"
        """What a page's bytes go through."""

    def digests(self, images: Bytes, which: Int32 | None = None) -> tuple[bytes, ...]:
        """32 bytes for each of `images[which]`, without `which` for all, of `[num_images, page_bytes]`.

        Raises ValueError where `page_bytes` is no multiple of 64.
        """
        which = np.arange(len(images), dtype=np.int32) if which is None else which
        if self.algorithm == "BLAKE3":
            return tuple(blake3(images[index].data, key=self._key).digest() for index in which)
        length = images.shape[1].to_bytes(_LENGTH_BYTES, "little")
        values = self._values(images, which)
        starts = range(0, len(values), _VALUE_BYTES)
        return tuple(blake3(values[at : at + _VALUE_BYTES] + length, key=self._key).digest() for at in starts)

    def _values(self, images: Bytes, which: Int32) -> bytes:
        values = np.empty(len(which) * _VALUE_BYTES, np.uint8)
        _native.adapters.hash_pages(self._isa, self._point, images, images.shape[1], which, values)
        return values.tobytes()
