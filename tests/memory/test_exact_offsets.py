"""The exact search against brute force, and against public instances that defeat every greedy order."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path

import pytest

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
        assert pack_exactly(buffers, 10.0).peak_bytes == least
        num_hard += pack(buffers).peak_bytes > least or lower_bound(buffers) < least
    assert num_hard > 0, "no instance needed a search"


def test_offsets_are_aligned() -> None:
    rng = random.Random(4)
    for _ in range(50):
        buffers = _random_buffers(rng, rng.randint(1, 12), alignment=4)
        packing = pack_exactly(buffers, 1.0)
        check_packing(buffers, packing)


@pytest.mark.skipif(not INSTANCES.is_dir(), reason="needs the public minimalloc instances")
@pytest.mark.parametrize("name", "CFJK")
def test_public_instances_fit_where_greedy_orders_do_not(name: str) -> None:
    with (INSTANCES / f"{name}.{CAPACITY_BYTES}.csv").open() as file:
        rows = [(int(row["size"]), int(row["lower"]), int(row["upper"])) for row in csv.DictReader(file)]
    buffers = [PlannedBuffer(*row) for row in rows]
    assert pack(buffers).peak_bytes > CAPACITY_BYTES
    packing = pack_within(buffers, CAPACITY_BYTES, 60.0)
    assert packing is not None
    check_packing(buffers, packing)
    assert packing.peak_bytes <= CAPACITY_BYTES
