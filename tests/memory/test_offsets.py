"""The offset planner against its judge, on random buffers and on eleven public hard instances."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.memory.offset_check import check_packing
from kvarto.memory.offsets import Packing, PlannedBuffer, lower_bound, pack

INSTANCES = Path(__file__).parents[3] / "shared/data/minimalloc"


@st.composite
def planned_buffers(draw: st.DrawFn) -> PlannedBuffer:
    first = draw(st.integers(0, 20))
    return PlannedBuffer(
        size_bytes=draw(st.integers(0, 300)),
        first=first,
        last=first + draw(st.integers(1, 8)),
        alignment=draw(st.sampled_from([1, 1, 8, 64])),
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(planned_buffers(), max_size=24))
def test_the_judge_accepts_every_packing(buffers: list[PlannedBuffer]) -> None:
    packing = pack(buffers)
    check_packing(buffers, packing)
    assert lower_bound(buffers) <= packing.peak_bytes
    assert packing == pack(buffers), "the same buffers were packed in two ways"


@settings(max_examples=100, deadline=None)
@given(st.lists(planned_buffers(), max_size=24))
def test_lower_bound_is_the_fullest_op(buffers: list[PlannedBuffer]) -> None:
    sums = [sum(b.size_bytes for b in buffers if b.first <= op < b.last) for op in range(30)]
    assert lower_bound(buffers) == max(sums)


def test_a_chain_needs_only_its_neighbours() -> None:
    """x -> y -> z -> …: each op reads one buffer and writes the next."""
    buffers = [PlannedBuffer(64, index, index + 2, 64) for index in range(50)]
    assert pack(buffers).peak_bytes == lower_bound(buffers) == 128


def test_equal_sizes_are_packed_perfectly() -> None:
    """Interval graphs are perfect: with one size, by start, the peak is the largest number that live together."""
    buffers = [PlannedBuffer(64, index * 7 % 40, index * 7 % 40 + 1 + index % 9, 64) for index in range(60)]
    assert pack(buffers).peak_bytes == lower_bound(buffers)


def test_no_buffers_take_no_bytes() -> None:
    assert pack([]) == Packing((), 0)


TWO = [PlannedBuffer(10, 0, 2), PlannedBuffer(10, 1, 3)]


@pytest.mark.parametrize(
    ("packing", "law"),
    [
        (Packing((0, 9), 19), "share the bytes 9 to 10"),
        (Packing((0, 0), 10), "share the bytes 0 to 10"),
        (Packing((0, 10), 21), "the peak is 20, not 21"),
        (Packing((0, 10), 19), "the peak is 20, not 19"),
        (Packing((0,), 10), "2 buffers have 1 offsets"),
        (Packing((0, -10), 10), "lies at -10"),
    ],
)
def test_the_judge_names_the_broken_law(packing: Packing, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_packing(TWO, packing)


def test_the_judge_names_a_broken_alignment() -> None:
    with pytest.raises(AssertionError, match="no multiple of 8"):
        check_packing([replace(TWO[0], alignment=8)], Packing((4,), 14))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(planned_buffers(), st.integers(0, 600)), min_size=2, max_size=5))
def test_the_judge_agrees_with_a_map_of_every_byte_at_every_op(placed: list[tuple[PlannedBuffer, int]]) -> None:
    taken = [
        (op, byte)
        for buffer, offset in placed
        for op in range(buffer.first, buffer.last)
        for byte in range(offset, offset + buffer.size_bytes)
    ]
    is_apart = len(taken) == len(set(taken))
    buffers = [replace(buffer, alignment=1) for buffer, _ in placed]
    peak_bytes = max((offset + buffer.size_bytes for buffer, offset in placed if buffer.size_bytes), default=0)
    packing = Packing(tuple(offset for _, offset in placed), peak_bytes)
    if is_apart:
        check_packing(buffers, packing)
    else:
        with pytest.raises(AssertionError, match="share the bytes"):
            check_packing(buffers, packing)


def test_buffers_that_never_meet_may_share_bytes() -> None:
    check_packing([PlannedBuffer(10, 0, 2), PlannedBuffer(10, 2, 3)], Packing((0, 0), 10))


@pytest.mark.parametrize("letter", "ABCDEFGHIJK")
def test_public_instances(letter: str) -> None:
    """Each is known to fit 1 MiB; greedy stays within 1.45 of that, as measured, and the judge accepts it."""
    path = INSTANCES / f"{letter}.1048576.csv"
    if not path.exists():
        pytest.skip("../shared/data/minimalloc is absent")
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    buffers = [PlannedBuffer(int(row["size"]), int(row["lower"]), int(row["upper"])) for row in rows]
    packing = pack(buffers)
    check_packing(buffers, packing)
    assert lower_bound(buffers) <= 1 << 20
    assert packing.peak_bytes <= 1.45 * (1 << 20)
