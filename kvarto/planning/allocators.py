"""Contiguous allocators, for comparison with pages: what a server without pages would have to use.

All hand out ranges of one span of bytes and keep no contents. A range is named by its offset.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol


class ContiguousAllocator(Protocol):
    """Ranges of a span of bytes."""

    name: str

    @property
    def free_bytes(self) -> int:
        """Bytes in holes, however small these are."""
        ...

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of a range of at least `size_bytes`; None when no hole is large enough."""
        ...

    def free(self, offset: int) -> None:
        """Give back the range that begins at `offset`."""
        ...

    def rounded(self, size_bytes: int) -> int:
        """Bytes that a range of `size_bytes` really takes."""
        ...

    def check(self) -> None:
        """Raise AssertionError naming the law that is broken."""
        ...


class FirstFit:
    """The lowest hole that is large enough; neighbouring holes merge at once.

    Source: Knuth, The Art of Computer Programming, vol. 1, 2.5.
    """

    name = "first fit"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._holes = [0] if capacity_bytes else []
        """Offsets, ascending."""
        self._hole_bytes = {0: capacity_bytes} if capacity_bytes else {}
        self._live: dict[int, int] = {}
        self._free_bytes = capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self._free_bytes

    def rounded(self, size_bytes: int) -> int:
        """First fit rounds nothing."""
        return size_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """The first `size_bytes` of the lowest hole that has them."""
        for index, offset in enumerate(self._holes):
            hole_bytes = self._hole_bytes[offset]
            if hole_bytes >= size_bytes:
                self._take(index, offset, hole_bytes, size_bytes)
                return offset
        return None

    def _take(self, index: int, offset: int, hole_bytes: int, size_bytes: int) -> None:
        del self._hole_bytes[offset]
        if hole_bytes > size_bytes:
            self._holes[index] = offset + size_bytes
            self._hole_bytes[offset + size_bytes] = hole_bytes - size_bytes
        else:
            del self._holes[index]
        self._live[offset] = size_bytes
        self._free_bytes -= size_bytes

    def free(self, offset: int) -> None:
        """Give a range back, merging it with the holes beside it."""
        size_bytes = self._live.pop(offset)
        self._free_bytes += size_bytes
        index = bisect_left(self._holes, offset)
        if index < len(self._holes) and self._holes[index] == offset + size_bytes:
            size_bytes += self._hole_bytes.pop(self._holes.pop(index))
        if index and self._holes[index - 1] + self._hole_bytes[self._holes[index - 1]] == offset:
            self._hole_bytes[self._holes[index - 1]] += size_bytes
        else:
            self._holes.insert(index, offset)
            self._hole_bytes[offset] = size_bytes

    def check(self) -> None:
        """Holes and ranges tile the span, and no two holes touch."""
        holes = [(offset, size_bytes, True) for offset, size_bytes in self._hole_bytes.items()]
        pieces = sorted(holes + [(offset, size_bytes, False) for offset, size_bytes in self._live.items()])
        end, was_hole = 0, False
        for offset, size_bytes, is_hole in pieces:
            assert offset == end, f"byte {end} belongs to nobody, or to two"
            assert not (is_hole and was_hole), f"holes that touch at {offset} were not merged"
            end, was_hole = offset + size_bytes, is_hole
        assert end == self._capacity_bytes, f"the span ends at {end} instead of {self._capacity_bytes}"
        assert self._free_bytes == sum(self._hole_bytes.values()), "free_bytes is not the sum of the holes"
        assert self._holes == sorted(self._hole_bytes), "the two records of holes differ"


class Compacting:
    """A bound that no allocator passes: live ranges move together at no cost, so only the sum of sizes counts."""

    name = "compacting"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._free_bytes = capacity_bytes
        self._live: dict[int, int] = {}
        self._num_allocated = 0

    @property
    def free_bytes(self) -> int:
        """Bytes outside live ranges, in one piece."""
        return self._free_bytes

    def rounded(self, size_bytes: int) -> int:
        """Nothing is rounded."""
        return size_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """A name instead of an offset: ranges move."""
        if size_bytes > self._free_bytes:
            return None
        self._num_allocated += 1
        self._live[self._num_allocated] = size_bytes
        self._free_bytes -= size_bytes
        return self._num_allocated

    def free(self, offset: int) -> None:
        """Give a range back."""
        self._free_bytes += self._live.pop(offset)

    def check(self) -> None:
        """Free and live bytes add up."""
        assert self._free_bytes + sum(self._live.values()) == self._capacity_bytes, "bytes were lost"


class Buddy:
    """Ranges of a power of two bytes; a freed range merges with its buddy when that is free too.

    A span that is not a power of two is divided into its binary parts, largest first.
    Source: Knowlton 1965; Knuth, The Art of Computer Programming, vol. 1, 2.5.
    """

    name = "buddy"

    def __init__(self, capacity_bytes: int, min_bytes: int = 4096) -> None:
        assert min_bytes & (min_bytes - 1) == 0, "the smallest range is a power of two"
        self._min_bytes = min_bytes
        self._capacity_bytes = capacity_bytes - capacity_bytes % min_bytes
        self._holes: dict[int, list[int]] = {}
        """Offsets by size, ascending: the lowest is taken."""
        self._roots: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._free_bytes = self._capacity_bytes
        self._lay_roots()

    def _lay_roots(self) -> None:
        offset = 0
        while offset < self._capacity_bytes:
            size_bytes = 1 << (self._capacity_bytes - offset).bit_length() - 1
            self._roots[offset] = size_bytes
            self._holes.setdefault(size_bytes, []).append(offset)
            offset += size_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        return self._free_bytes

    def rounded(self, size_bytes: int) -> int:
        """The next power of two."""
        return max(self._min_bytes, 1 << (size_bytes - 1).bit_length())

    def allocate(self, size_bytes: int) -> int | None:
        """The lowest of the smallest holes that suffice, halved until it fits."""
        wanted = self.rounded(size_bytes)
        hole_bytes = min((size for size, holes in self._holes.items() if size >= wanted and holes), default=None)
        if hole_bytes is None:
            return None
        offset = self._holes[hole_bytes].pop(0)
        while hole_bytes > wanted:
            hole_bytes //= 2
            insort(self._holes.setdefault(hole_bytes, []), offset + hole_bytes)
        self._live[offset] = wanted
        self._free_bytes -= wanted
        return offset

    def free(self, offset: int) -> None:
        """Give a range back, merging buddies up to the root that it was cut from."""
        size_bytes = self._live.pop(offset)
        self._free_bytes += size_bytes
        root = self._root_of(offset)
        while size_bytes < self._roots[root]:
            buddy = root + ((offset - root) ^ size_bytes)
            holes = self._holes.get(size_bytes, [])
            index = bisect_left(holes, buddy)
            if index == len(holes) or holes[index] != buddy:
                break
            del holes[index]
            offset = min(offset, buddy)
            size_bytes *= 2
        insort(self._holes.setdefault(size_bytes, []), offset)

    def _root_of(self, offset: int) -> int:
        return next(root for root, size_bytes in self._roots.items() if root <= offset < root + size_bytes)

    def check(self) -> None:
        """Holes and ranges tile the span; no free pair of buddies was left apart."""
        holes = [(offset, size) for size, offsets in self._holes.items() for offset in offsets]
        end = 0
        for offset, size_bytes in sorted(holes + list(self._live.items())):
            assert offset == end, f"byte {end} belongs to nobody, or to two"
            end = offset + size_bytes
        assert end == self._capacity_bytes, f"the span ends at {end} instead of {self._capacity_bytes}"
        assert self._free_bytes == sum(size for _, size in holes), "free_bytes is not the sum of the holes"
        for offset, size_bytes in holes:
            root = self._root_of(offset)
            buddy = root + ((offset - root) ^ size_bytes)
            is_pair = size_bytes < self._roots[root] and (buddy, size_bytes) in holes
            assert not is_pair, f"buddies at {offset} and {buddy} were not merged"
