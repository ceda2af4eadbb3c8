"""The judge of a packing: written apart from the planner and without its tricks, so that both are not wrong alike.

Each buffer is compared with all that are live when it begins. A start-up plan runs it too: a few
hundred buffers take milliseconds, and an overlap would be silent corruption.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.memory.offsets import Packing, PlannedBuffer


def check_packing(buffers: Sequence[PlannedBuffer], packing: Packing) -> None:
    """Raise AssertionError naming the first broken law: one offset each, aligned, no overlap, the peak exact."""
    offsets = packing.offsets
    assert len(offsets) == len(buffers), f"{len(buffers)} buffers have {len(offsets)} offsets"
    placed = list(zip(buffers, offsets, strict=True))
    for buffer, offset in placed:
        assert offset >= 0, f"{buffer} lies at {offset}"
        assert offset % buffer.alignment == 0, f"{buffer} lies at {offset}, no multiple of {buffer.alignment}"
    peak_bytes = max((offset + buffer.size_bytes for buffer, offset in placed if buffer.size_bytes), default=0)
    assert packing.peak_bytes == peak_bytes, f"the peak is {peak_bytes}, not {packing.peak_bytes}"
    # Of two buffers that are ever live together, one is live when the other begins.
    live: list[tuple[PlannedBuffer, int]] = []
    for buffer, offset in sorted(placed, key=lambda each: each[0].first):
        live = [(other, at) for other, at in live if other.last > buffer.first]
        for other, at in live:
            _check_apart(buffer, offset, other, at)
        live.append((buffer, offset))


def _check_apart(buffer: PlannedBuffer, offset: int, other: PlannedBuffer, other_offset: int) -> None:
    start = max(offset, other_offset)
    end = min(offset + buffer.size_bytes, other_offset + other.size_bytes)
    assert start >= end, (
        f"{buffer} at {offset} and {other} at {other_offset} share the bytes {start} to {end} while both live"
    )
