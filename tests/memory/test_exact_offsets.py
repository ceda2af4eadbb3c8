"""The exact search against brute force, and against public instances that defeat every greedy order."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path

import pytest

from kvarto.core import _native
from kvarto.memory.exact_offsets import pack_exactly, pack_within
from kvarto.memory.offset_check import check_packing
from kvarto.memory.offsets import PlannedBuffer, lower_bound, pack

INSTANCES = Path(__file__).parents[3] / "shared" / "data" / "minimalloc"
CAPACITY_BYTES = 1_048_576


def _random_buffers(rng: random.Random, count: int, alignment: int = 1) -> list[PlannedBuffer]:
    buffers = []
    for _ in range(count):
        first = rng.randrange(8)
        buffers.append(PlannedBuffer(rng.randrange(0, 9), first, rng.randint(first + 1, 9), alignment))
    return buffers


def _least_peak(buffers: list[PlannedBuffer]) -> int:
    """Try every order: some order of lowest gaps is optimal."""
    best = sum(buffer.size_bytes for buffer in buffers)
    for order in itertools.permutations(buffers):
        placed: list[tuple[PlannedBuffer, int]] = []
        for buffer in order:
            offset = 0
            for start, end in sorted(
                (at, at + other.size_bytes)
                for other, at in placed
                if other.first < buffer.last and buffer.first < other.last and other.size_bytes
            ):
                if offset + buffer.size_bytes <= start:
                    break
                offset = max(offset, end)
            placed.append((buffer, offset))
        best = min(best, max((at + b.size_bytes for b, at in placed if b.size_bytes), default=0))
    return best


def _full_buffers(rng: random.Random, load: int, num_ops: int) -> list[PlannedBuffer]:
    """At every op, live bytes are exactly `load`: no gap is allowed at a peak of `load`."""
    room = [load] * num_ops
    buffers = []
    while any(room):
        first = rng.choice([op for op in range(num_ops) if room[op]])
        last = first + 1
        while last < num_ops and room[last] and rng.random() < 0.7:
            last += 1
        most = min(room[first:last])
        size = rng.randint(max(1, most // 3), most)
        room[first:last] = [left - size for left in room[first:last]]
        buffers.append(PlannedBuffer(size, first, last))
    return buffers


def _fits(buffers: list[PlannedBuffer], capacity: int, placed: tuple[tuple[PlannedBuffer, int], ...] = ()) -> bool:
    """Try every offset of every buffer."""
    if len(placed) == len(buffers):
        return True
    buffer = buffers[len(placed)]
    clashing = [(b, at) for b, at in placed if b.first < buffer.last and buffer.first < b.last]
    return any(
        _fits(buffers, capacity, (*placed, (buffer, offset)))
        for offset in range(capacity - buffer.size_bytes + 1)
        if all(offset + buffer.size_bytes <= at or at + b.size_bytes <= offset for b, at in clashing)
    )


def _is_refuted(buffers: list[PlannedBuffer], capacity: int) -> bool:
    """Whether the search says that it has looked everywhere."""
    items = [(buffer.size_bytes, buffer.first, buffer.last) for buffer in buffers]
    offsets, is_complete, _ = _native.planning.search_offsets(items, capacity, 10.0)
    return offsets is None and is_complete


def test_a_search_finds_the_least_peak_and_nothing_below_it() -> None:
    rng = random.Random(3)
    num_hard = 0
    for _ in range(60):
        buffers = _random_buffers(rng, rng.randint(1, 5))
        least = _least_peak(buffers)
        packing = pack_within(buffers, least, 10.0)
        assert packing is not None
        check_packing(buffers, packing)
        assert packing.peak_bytes == least
        assert least == 0 or pack_within(buffers, least - 1, 10.0) is None
        assert least == 0 or _is_refuted(buffers, least - 1)
        assert pack_exactly(buffers, 10.0).peak_bytes == least
        num_hard += pack(buffers).peak_bytes > least or lower_bound(buffers) < least
    assert num_hard > 0, "no instance needed a search"


def test_full_instances_fit_just_where_brute_force_says() -> None:
    rng = random.Random(5)
    num_refuted = 0
    for _ in range(300):
        buffers = _full_buffers(rng, load=9, num_ops=8)
        packing = pack_within(buffers, 9, 10.0)
        assert (packing is not None) == _fits(buffers, 9)
        if packing is not None:
            check_packing(buffers, packing)
        else:
            assert _is_refuted(buffers, 9)
            num_refuted += 1
    assert num_refuted > 0, "all instances fit"


def test_an_instance_that_needs_more_than_its_largest_load() -> None:
    rows = [(5, 0, 2), (3, 0, 1), (2, 1, 4), (1, 1, 3), (2, 2, 4), (3, 2, 3), (4, 3, 7), (4, 4, 7)]
    buffers = [PlannedBuffer(*row) for row in rows]
    assert lower_bound(buffers) == 8
    assert not _fits(buffers, 8)
    assert _is_refuted(buffers, 8)
    packing = pack_within(buffers, 9, 10.0)
    assert packing is not None
    check_packing(buffers, packing)


def test_a_search_is_deterministic() -> None:
    buffers = _full_buffers(random.Random(6), load=60, num_ops=12)
    assert pack_within(buffers, 61, 10.0) == pack_within(buffers, 61, 10.0)


def test_offsets_are_aligned() -> None:
    rng = random.Random(4)
    for _ in range(50):
        buffers = _random_buffers(rng, rng.randint(1, 12), alignment=4)
        packing = pack_exactly(buffers, 1.0)
        check_packing(buffers, packing)


@pytest.mark.skipif(not INSTANCES.is_dir(), reason="needs the public minimalloc instances")
@pytest.mark.parametrize("name", "ABCDEFGHIJK")
def test_public_instances_fit_where_greedy_orders_do_not(name: str) -> None:
    with (INSTANCES / f"{name}.{CAPACITY_BYTES}.csv").open() as file:
        rows = [(int(row["size"]), int(row["lower"]), int(row["upper"])) for row in csv.DictReader(file)]
    buffers = [PlannedBuffer(*row) for row in rows]
    assert pack(buffers).peak_bytes > CAPACITY_BYTES
    packing = pack_within(buffers, CAPACITY_BYTES, 10.0)  # the slowest takes under one second
    assert packing is not None
    check_packing(buffers, packing)
    assert packing.peak_bytes <= CAPACITY_BYTES
