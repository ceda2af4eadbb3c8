"""Calls to the system that the arena needs and Python lacks: `madvise` and its like, which let other threads run.

`mmap.madvise` holds the interpreter's lock while the kernel fills pages, which would stop the engine; a call through
ctypes gives it up. Addresses and sizes here are multiples of the system's page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from kvarto.core.errors import MemoryLimitError
from kvarto.core.units import format_bytes

MADV_DONTNEED = 4
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
"""Linux 5.14: make pages present and writable without changing a byte."""

SYSTEM_PAGE_BYTES = mmap.PAGESIZE
_PRESENT, _EXCLUSIVE = np.uint64(1 << 63), np.uint64(1 << 56)
"""Bits of an entry of /proc/self/pagemap."""

_libc = ctypes.CDLL(None, use_errno=True)
for _call, _extra in (("madvise", (ctypes.c_int,)), ("mlock", ()), ("munlock", ())):
    getattr(_libc, _call).argtypes = (ctypes.c_void_p, ctypes.c_size_t, *_extra)
    getattr(_libc, _call).restype = ctypes.c_int


def advise(address: int, size_bytes: int, advice: int) -> None:
    """`madvise(2)`. Raises OSError."""
    _raise_on_failure(_libc.madvise(address, size_bytes, advice))


def populate(address: int, size_bytes: int) -> None:
    """Back the range with memory without changing a byte, also while other threads write to it.

    Raises MemoryLimitError when the system has none to give, or cannot do it.
    """
    try:
        advise(address, size_bytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _refused(size_bytes, error) from error
        _populate_by_lock(address, size_bytes)


def resident_bytes(address: int, size_bytes: int) -> int:
    """Bytes of a private range that have memory of their own, by `/proc/self/pagemap`; the shared zero page is none."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // SYSTEM_PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(size_bytes // SYSTEM_PAGE_BYTES * 8), np.uint64)
    is_own = (entries & _PRESENT != 0) & (entries & _EXCLUSIVE != 0)
    return int(np.count_nonzero(is_own)) * SYSTEM_PAGE_BYTES


def process_bytes() -> int | None:
    """Memory that this process has now, by `/proc/self/statm`; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * SYSTEM_PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def _populate_by_lock(address: int, size_bytes: int) -> None:
    """For older kernels: locking a private range faults it in for writing; a store would race with other threads."""
    try:
        _raise_on_failure(_libc.mlock(address, size_bytes))
        _raise_on_failure(_libc.munlock(address, size_bytes))
    except OSError as error:
        raise _refused(size_bytes, error) from error


def _refused(size_bytes: int, error: OSError) -> MemoryLimitError:
    return MemoryLimitError(
        f"the system did not back {format_bytes(size_bytes)} of the arena ({error.strerror}); lower `--device-memory`, "
        "raise the memory limit, or start without `--prefault`"
    )


def _raise_on_failure(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
