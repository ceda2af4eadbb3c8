"""The judge of a packing: slower than the planner on purpose, and written apart, so that both are not wrong alike.

Every pair of buffers is compared. A start-up plan runs it too: a few hundred buffers take milliseconds, and an overlap
would be silent corruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvarto.memory.offsets import Packing, PlannedBuffer


def check_packing(buffers: Sequence[PlannedBuffer], packing: Packing) -> None:
    """Raise AssertionError naming the first broken law: one offset each, aligned, no overlap, the peak exact."""
    offsets = packing.offsets
    assert len(offsets) == len(buffers), f"{len(buffers)} buffers have {len(offsets)} offsets"
    for buffer, offset in zip(buffers, offsets, strict=True):
        assert offset >= 0, f"{buffer} lies at {offset}"
        assert offset % buffer.alignment == 0, f"{buffer} lies at {offset}, no multiple of {buffer.alignment}"
    ends = [offset + buffer.size_bytes for buffer, offset in zip(buffers, offsets, strict=True) if buffer.size_bytes]
    assert packing.peak_bytes == max(ends, default=0), f"the peak is {max(ends, default=0)}, not {packing.peak_bytes}"
    for (buffer, offset), (other, other_offset) in combinations(zip(buffers, offsets, strict=True), 2):
        is_live_together = max(buffer.first, other.first) < min(buffer.last, other.last)
        start = max(offset, other_offset)
        end = min(offset + buffer.size_bytes, other_offset + other.size_bytes)
        assert not (is_live_together and start < end), (
            f"{buffer} at {offset} and {other} at {other_offset} share the bytes {start} to {end} while both live"
        )
