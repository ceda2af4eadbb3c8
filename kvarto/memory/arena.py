"""Arena: one range of addresses for everything of a tier, reserved at once and backed by granules when touched.

    mapping   |..|=========================================|...|
                 ^ aligned to a granule (2 MiB)            ^ size_bytes, rounded up to a granule
                 | weights | activations | pages ......... |

Addresses never move: a released granule is empty and comes back zeroed at its next touch. The mapping is private, not
inherited by children (a fork would double what is written), and left out of core dumps (prompts are in there).
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import MemoryLimitError
from kvarto.core.units import MIB, align_up, format_bytes
from kvarto.memory.prefault import Prefault
from kvarto.memory.system_memory import (
    MADV_DONTDUMP,
    MADV_DONTFORK,
    MADV_DONTNEED,
    MADV_HUGEPAGE,
    advise,
    resident_bytes,
)

GRANULE_BYTES = 2 * MIB
"""A huge page: what the system backs and takes back at once."""


class Arena:
    """`size_bytes` of host memory, zero at first. Raises MemoryLimitError when the machine refuses to reserve it."""

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, f"an arena of {size_bytes} bytes"
        self.size_bytes = size_bytes
        self._reserved_bytes = align_up(size_bytes, GRANULE_BYTES)
        self._mapping = _reserve(self._reserved_bytes + GRANULE_BYTES)
        array = np.frombuffer(self._mapping, np.uint8)
        start = -array.ctypes.data % GRANULE_BYTES
        self._array: NDArray[np.uint8] | None = array[start : start + size_bytes]
        self._address = array.ctypes.data + start
        self._prefaults: list[Prefault] = []
        self.has_huge_pages = self._advise_reserved()

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes, `[size_bytes]`."""
        assert self._array is not None, "the arena is closed"
        return self._array

    @property
    def address(self) -> int:
        """Of byte 0, for native code; a multiple of a granule."""
        return self._address

    @property
    def resident_bytes(self) -> int:
        """Bytes that are backed by memory now, as the system says: 8 bytes read per page, for tests and reports."""
        return resident_bytes(self._address, self._reserved_bytes)

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes `[offset, offset + size_bytes)`, shared with the arena."""
        self._check_range(offset, size_bytes)
        return self.array[offset : offset + size_bytes]

    def prefault(self, offset: int, size_bytes: int) -> Prefault:
        """Begin to back the granules of the range in the background; changes no byte. Wait on what is returned."""
        self._check_range(offset, size_bytes)
        first = offset // GRANULE_BYTES * GRANULE_BYTES
        last = align_up(offset + size_bytes, GRANULE_BYTES)
        prefault = Prefault(self._address + first, last - first)
        self._prefaults = [*(p for p in self._prefaults if not p.is_done), prefault]
        return prefault

    def release(self, offset: int, size_bytes: int) -> int:
        """Give back the whole granules inside the range, whose bytes become zero. Returns the bytes given back."""
        self._check_range(offset, size_bytes)
        first = align_up(offset, GRANULE_BYTES)
        end = offset + size_bytes
        # The last granule's tail beyond `size_bytes` belongs to nobody, so that it goes with the arena's last byte.
        last = self._reserved_bytes if end == self.size_bytes else end // GRANULE_BYTES * GRANULE_BYTES
        if last <= first:
            return 0
        advise(self._address + first, last - first, MADV_DONTNEED)
        return last - first

    def close(self) -> None:
        """Give all memory back. Views that are still alive then read zeros; the addresses go with the last of them."""
        if self._array is None:
            return
        for prefault in self._prefaults:
            prefault.stop()
        advise(self._address, self._reserved_bytes, MADV_DONTNEED)
        self._array = None
        with contextlib.suppress(BufferError):  # a view is alive; its death unmaps
            self._mapping.close()

    def _check_range(self, offset: int, size_bytes: int) -> None:
        assert self._array is not None, "the arena is closed"
        is_inside = min(offset, size_bytes) >= 0 and offset + size_bytes <= self.size_bytes
        assert is_inside, f"[{offset}, {offset + size_bytes}) is not inside an arena of {self.size_bytes} bytes"

    def _advise_reserved(self) -> bool:
        """Set what holds for the whole mapping; returns whether the kernel knows huge pages."""
        advise(self._address, self._reserved_bytes, MADV_DONTFORK)
        advise(self._address, self._reserved_bytes, MADV_DONTDUMP)
        try:
            advise(self._address, self._reserved_bytes, MADV_HUGEPAGE)
        except OSError:  # built without transparent huge pages: slower, not wrong
            return False
        return True


def _reserve(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryLimitError(
            f"the machine refused to reserve an arena of {format_bytes(size_bytes)} ({error}); lower "
            "`--device-memory`, or raise the address-space limit (`ulimit -v`) or `vm.overcommit_memory`"
        ) from error
