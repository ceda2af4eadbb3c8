"""Bytes of a test's arena that nothing was put into: under the address sanitizer, native code may not touch them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvarto.core import _native

Array = np.ndarray[Any, Any]
RED_ZONE_BYTES = 64
"""Between the parts of an arena, in tests: a cache line, and the widest vector."""
_GRAIN = 8
"""Bytes that share a mark: a gap begins at the next multiple."""


def poison_gaps(arena: Array, used: Iterable[tuple[int, int]]) -> None:
    """Poison all of `arena: [bytes]` but the ranges `used`, each (offset, size in bytes). Nothing happens in builds
    without the sanitizer. Marks go with the array that owns the memory, which NumPy may use again, and with `clear`.
    """
    if not hasattr(_native.memory, "poison"):
        return
    if isinstance(owner := arena if arena.base is None else arena.base, np.ndarray):
        weakref.finalize(owner, _native.memory.unpoison, arena.ctypes.data, arena.nbytes)
    end = 0
    for start, size_bytes in [*sorted(used), (arena.nbytes, 0)]:
        first = -(-end // _GRAIN) * _GRAIN
        if first < start:
            _native.memory.poison(arena.ctypes.data + first, start - first)
        end = max(end, start + size_bytes)


def clear(arena: Array) -> None:
    """Undo `poison_gaps`, before memory goes back that no array owns."""
    if hasattr(_native.memory, "unpoison"):
        _native.memory.unpoison(arena.ctypes.data, arena.nbytes)
