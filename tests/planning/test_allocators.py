"""First fit and buddy against the plainest description of each: a list of bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvarto.planning.allocators import Buddy, Compacting, ContiguousAllocator, FirstFit

UNIT = 16
ALLOCATORS: dict[str, Callable[[int], ContiguousAllocator]] = {
    "first fit": FirstFit,
    "buddy": lambda capacity: Buddy(capacity, min_bytes=UNIT),
    "compacting": Compacting,
}


class ByteMap:
    """A span as one truth value per unit; slow on purpose."""

    def __init__(self, capacity_bytes: int) -> None:
        self.is_free = [True] * (capacity_bytes // UNIT)

    def mark(self, offset: int, size_bytes: int, *, is_free: bool) -> None:
        cells = range(offset // UNIT, (offset + size_bytes) // UNIT)
        assert all(self.is_free[cell] is not is_free for cell in cells), "a range overlaps another, or was not held"
        for cell in cells:
            self.is_free[cell] = is_free

    def first_hole(self, size_bytes: int, step: int = 1) -> int | None:
        need = size_bytes // UNIT
        starts = range(0, len(self.is_free) - need + 1, step)
        return next((start * UNIT for start in starts if all(self.is_free[start : start + need])), None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity_units", [64, 100])
def test_first_fit_takes_the_lowest_hole_and_refuses_only_without_one(seed: int, capacity_units: int) -> None:
    rng = random.Random(seed)
    allocator, model = FirstFit(capacity_units * UNIT), ByteMap(capacity_units * UNIT)
    live: dict[int, int] = {}
    for _ in range(600):
        if live and rng.random() < 0.45:
            offset = rng.choice(list(live))
            model.mark(offset, live.pop(offset), is_free=True)
            allocator.free(offset)
        else:
            size_bytes = rng.randint(1, 20) * UNIT
            offset_or_none = allocator.allocate(size_bytes)
            assert offset_or_none == model.first_hole(size_bytes)
            if offset_or_none is not None:
                model.mark(offset_or_none, size_bytes, is_free=False)
                live[offset_or_none] = size_bytes
        allocator.check()
        assert allocator.free_bytes == sum(model.is_free) * UNIT


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity_units", [64, 100])
def test_buddy_ranges_are_aligned_and_refused_only_without_an_aligned_hole(seed: int, capacity_units: int) -> None:
    rng = random.Random(seed)
    allocator, model = Buddy(capacity_units * UNIT, min_bytes=UNIT), ByteMap(capacity_units * UNIT)
    live: dict[int, int] = {}
    for _ in range(600):
        if live and rng.random() < 0.45:
            offset = rng.choice(list(live))
            model.mark(offset, live.pop(offset), is_free=True)
            allocator.free(offset)
        else:
            rounded = allocator.rounded(rng.randint(1, 20 * UNIT))
            offset_or_none = allocator.allocate(rounded)
            # The parts of a span, largest first, begin at multiples of their size: so do all ranges.
            hole = model.first_hole(rounded, step=rounded // UNIT)
            assert (offset_or_none is None) == (hole is None)
            if offset_or_none is not None:
                assert offset_or_none % rounded == 0
                model.mark(offset_or_none, rounded, is_free=False)
                live[offset_or_none] = rounded
        allocator.check()
        assert allocator.free_bytes == sum(model.is_free) * UNIT


@pytest.mark.parametrize("name", ALLOCATORS)
def test_everything_freed_is_one_piece_again(name: str) -> None:
    rng = random.Random(7)
    allocator = ALLOCATORS[name](64 * UNIT)
    for _ in range(20):
        held = [offset for _ in range(30) if (offset := allocator.allocate(rng.randint(1, 9) * UNIT)) is not None]
        assert held
        rng.shuffle(held)
        for offset in held:
            allocator.free(offset)
        allocator.check()
        whole = allocator.allocate(64 * UNIT)
        assert whole is not None
        assert allocator.free_bytes == 0
        assert allocator.allocate(UNIT) is None
        allocator.free(whole)


def test_the_check_can_fail() -> None:
    allocator = FirstFit(64)
    allocator.allocate(16)
    allocator._live.clear()
    with pytest.raises(AssertionError, match="belongs to nobody"):
        allocator.check()


def test_first_fit_fragments_where_compacting_does_not() -> None:
    for make, fits in ((FirstFit, False), (Compacting, True)):
        allocator = make(4 * UNIT)
        held = [allocator.allocate(UNIT) for _ in range(4)]
        for offset in held[::2]:
            assert offset is not None
            allocator.free(offset)
        assert allocator.free_bytes == 2 * UNIT
        assert (allocator.allocate(2 * UNIT) is not None) == fits
