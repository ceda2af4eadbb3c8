"""Offset planner: packs buffers with lifespans into one region so that its peak is small.

    bytes ^   +-----------+
          |   |     b     |  +----+        Two buffers may share bytes when their lifespans do not overlap; a lifespan
          | +-+---+-------+--+ d  |        is a half-open range of op indices. A buffer goes to the lowest gap, among
          | |  a  |    | c       |         the buffers already placed that it overlaps in time, which is large enough.
          +-+-----+----+----------> ops    What is placed first decides, so several orders are tried and the best kept.

Knows sizes and numbers only. `offset_check` judges the result. Greedy orders as in TVM's and MiniMalloc's baselines
(Moffitt, MiniMalloc, ASPLOS 2023); dynamic storage allocation is NP-hard, and no order is best for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvarto.core.units import align_up


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer to be placed: live in ops `first` to `last - 1`."""

    size_bytes: int
    first: int
    last: int
    alignment: int = 1
    """Bytes; its offset becomes a multiple."""

    def __post_init__(self) -> None:
        assert self.size_bytes >= 0, f"{self} has a negative size"
        assert self.first < self.last, f"{self} is never live"
        assert self.alignment > 0, f"{self} has no alignment"

    @property
    def area(self) -> int:
        """Bytes times ops."""
        return self.size_bytes * (self.last - self.first)


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets in the order of the buffers given, and the end of the highest buffer."""

    offsets: tuple[int, ...]
    peak_bytes: int


Order = Callable[[PlannedBuffer], tuple[int, ...]]

ORDERS: dict[str, Order] = {
    "size": lambda b: (-b.size_bytes, b.first - b.last, b.first),
    "area": lambda b: (-b.area, -b.size_bytes, b.first),
    "lifespan": lambda b: (b.first - b.last, -b.size_bytes, b.first),
    "start": lambda b: (b.first, -b.size_bytes, b.last),
}
"""Which buffer is placed first, by name of the order; the smallest key goes first."""


def pack(buffers: Sequence[PlannedBuffer]) -> Packing:
    """Offsets for `buffers`: the best of the greedy orders. O(n × buffers that live together) per order."""
    target_bytes = lower_bound(buffers)
    neighbours = _neighbours(buffers)
    best: Packing | None = None
    for order in _orders(buffers):
        packing = _place(buffers, order, neighbours)
        if best is None or packing.peak_bytes < best.peak_bytes:
            best = packing
        if best.peak_bytes == target_bytes:
            break
    assert best is not None
    return best


def lower_bound(buffers: Sequence[PlannedBuffer]) -> int:
    """The largest sum of live buffers at any op: no packing can be smaller."""
    return max(live_bytes(buffers).values(), default=0)


def live_bytes(buffers: Iterable[PlannedBuffer]) -> dict[int, int]:
    """Sum of the sizes that are live, by the op index from which on it holds."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.size_bytes
        changes[buffer.last] = changes.get(buffer.last, 0) - buffer.size_bytes
    live = 0
    sums = {}
    for index in sorted(changes):
        live += changes[index]
        sums[index] = live
    return sums


def _neighbours(buffers: Sequence[PlannedBuffer]) -> list[list[int]]:
    """For each buffer the others that are live at some op together with it."""
    neighbours: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].first):
        live = [other for other in live if buffers[other].last > buffers[index].first]
        for other in live:
            neighbours[other].append(index)
        neighbours[index] = live.copy()
        live.append(index)
    return neighbours


def _orders(buffers: Sequence[PlannedBuffer]) -> Iterable[list[int]]:
    for key in ORDERS.values():
        yield sorted(range(len(buffers)), key=lambda index: key(buffers[index]))
    yield _by_pressure(buffers)


def _by_pressure(buffers: Sequence[PlannedBuffer]) -> list[int]:
    """Buffers that live where most bytes are live go first: the peak is decided there."""
    live = live_bytes(buffers)

    def pressure(buffer: PlannedBuffer) -> int:
        return max(size for index, size in live.items() if buffer.first <= index < buffer.last)

    pressures = [pressure(buffer) for buffer in buffers]
    return sorted(range(len(buffers)), key=lambda i: (-pressures[i], -buffers[i].size_bytes, buffers[i].first))


def _place(buffers: Sequence[PlannedBuffer], order: Iterable[int], neighbours: Sequence[Sequence[int]]) -> Packing:
    offsets: list[int | None] = [None] * len(buffers)
    for index in order:
        taken = ((offsets[other], buffers[other].size_bytes) for other in neighbours[index])
        placed = sorted((offset, offset + size) for offset, size in taken if offset is not None and size > 0)
        offsets[index] = _lowest_gap(buffers[index], placed)
    final = tuple(offset for offset in offsets if offset is not None)
    ends = (offset + buffer.size_bytes for offset, buffer in zip(final, buffers, strict=True) if buffer.size_bytes)
    return Packing(final, max(ends, default=0))


def _lowest_gap(buffer: PlannedBuffer, placed: Iterable[tuple[int, int]]) -> int:
    """Lowest aligned offset at which `buffer` fits between the spans `placed`, which ascend."""
    offset = 0
    for start, end in placed:
        if offset + buffer.size_bytes <= start:
            return offset
        offset = max(offset, align_up(end, buffer.alignment))
    return offset
