"""ShapeCache: what adapters of equal shape have in common, by a digest of all that it follows from.

Adapters of one training recipe have the same config and the same header, byte for byte, and differ in values alone. So
what is checked and planned from those bytes is the same, and is there once for thousands of them.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

from blake3 import blake3

from kvarto.core.digest_fields import field

MAX_TENSORS = 1 << 16
"""Of all that is kept: some 60 MB."""

Shape = TypeVar("Shape")


def shape_key(config: bytes, header: bytes, file_bytes: int) -> bytes:
    """32 bytes. `file_bytes`: of the file with the tensors, which headers are checked against."""
    return blake3(field(b"C", config) + field(b"H", header) + field(b"S", file_bytes.to_bytes(8, "little"))).digest()


class ShapeCache(Generic[Shape]):
    """The shapes used last. For one base and one set of limits; safe to use from threads."""

    def __init__(self, max_tensors: int = MAX_TENSORS) -> None:
        self._max_tensors = max_tensors
        self._num_tensors = 0
        self._lock = Lock()
        self._shapes: OrderedDict[bytes, tuple[Shape, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: bytes) -> Shape | None:
        """What was added under the key, if it is still there."""
        with self._lock:
            if key not in self._shapes:
                return None
            self._shapes.move_to_end(key)
            return self._shapes[key][0]

    def add(self, key: bytes, shape: Shape, num_tensors: int) -> Shape:
        """Keep a shape that was made of so many tensors. Returns the one that is kept, which another thread may have
        added meanwhile: equal adapters share one.
        """
        with self._lock:
            if key in self._shapes:
                return self._shapes[key][0]
            self._shapes[key] = shape, num_tensors
            self._num_tensors += num_tensors
            while self._num_tensors > self._max_tensors and len(self._shapes) > 1:
                _, (_, count) = self._shapes.popitem(last=False)
                self._num_tensors -= count
            return shape
