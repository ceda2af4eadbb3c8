"""Offsets by exact search, for when the greedy orders of `offsets` leave a gap: seconds instead of milliseconds.

The search itself is native code; this asks it for smaller and smaller capacities, and keeps the best that it found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvarto.core import _native
from kvarto.core.units import align_up
from kvarto.memory.offsets import Packing, PlannedBuffer, lower_bound, pack


def pack_within(buffers: Sequence[PlannedBuffer], capacity_bytes: int, time_limit_s: float) -> Packing | None:
    """A packing whose peak is at most `capacity_bytes`; None when there is none, or none was found in time.

    Sizes count as multiples of the strictest alignment, so that sums of sizes are aligned offsets.
    """
    alignment = max((buffer.alignment for buffer in buffers), default=1)
    assert all(alignment % buffer.alignment == 0 for buffer in buffers), "alignments do not divide each other"
    sizes = [align_up(buffer.size_bytes, alignment) for buffer in buffers]
    items = [(size, buffer.first, buffer.last) for size, buffer in zip(sizes, buffers, strict=True)]
    offsets, _, _ = _native.planning.search_offsets(items, align_up(capacity_bytes, alignment), time_limit_s)
    if offsets is None:
        return None
    ends = [offset + b.size_bytes for offset, b in zip(offsets, buffers, strict=True) if b.size_bytes]
    peak_bytes = max(ends, default=0)
    return Packing(tuple(offsets), peak_bytes) if peak_bytes <= capacity_bytes else None


def pack_exactly(buffers: Sequence[PlannedBuffer], time_limit_s: float) -> Packing:
    """The smallest peak that greedy orders and searches of `time_limit_s` seconds together find."""
    best = pack(buffers)
    least_bytes, deadline = lower_bound(buffers), time.monotonic() + time_limit_s
    while least_bytes < best.peak_bytes and (left_s := deadline - time.monotonic()) > 0:
        # The bound first: hard instances are often tight. Then halves of what is left between it and the best.
        capacity_bytes = least_bytes if least_bytes == lower_bound(buffers) else (least_bytes + best.peak_bytes) // 2
        found = pack_within(buffers, capacity_bytes, left_s / 2)
        if found is not None:
            best = found
        else:
            least_bytes = capacity_bytes + 1
    return best
