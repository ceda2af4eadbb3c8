"""Keep the C heap small, so that an engine's memory is its plan and little else.

glibc keeps an arena per thread and raises its own thresholds as large blocks are freed; both let memory grow that
nobody uses. Fixed thresholds return big blocks at once. On other C libraries this does nothing.
"""

from __future__ import annotations

import ctypes
import platform

from kvarto.core.units import KIB

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

MMAP_THRESHOLD_BYTES = 256 * KIB
TRIM_THRESHOLD_BYTES = 128 * KIB
MAX_ARENAS = 1
"""The loop's thread does nearly all that allocates."""


def keep_heap_small() -> None:
    """Call before threads start."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, MAX_ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def trim_heap() -> None:
    """Give back what loading left free."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
