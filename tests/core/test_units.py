"""Sizes and counts: exact integers in, exact integers out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.core.units import GIB, KIB, MIB, align_up, ceil_div, format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), ("17", 17), ("8GiB", 8 * GIB), ("8g", 8 * GIB), ("8GB", 8 * 10**9), ("512MiB", 512 * MIB),
        ("1.5K", 1536), (" 2 TiB ", 2 * 1024 * GIB), ("0.1KB", 100), (123, 123), ("10b", 10),
    ],
)  # fmt: skip
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 XB", "-1", "1e9", "0x10", "1..5G", "٣GiB", "8GiB8", -1])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@given(st.integers(0, 2**70))
def test_plain_bytes_survive(value: int) -> None:
    assert parse_bytes(str(value)) == value == parse_bytes(value)


@pytest.mark.parametrize(("text", "expected"), [("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("7", 7), (9, 9)])
def test_counts(text: str | int, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["k", "4kk", "-3", "1.5.2k", "many", "4.5", "1.00001k"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="count"):
        parse_count(text)


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_rounding_up(value: int, step: int) -> None:
    assert align_up(value, step) == ceil_div(value, step) * step
    assert 0 <= align_up(value, step) - value < step


def test_sizes_are_printed_in_binary_units() -> None:
    sizes = {17: "17 B", 3 * KIB: "3.00 KiB", 5 * MIB // 2: "2.50 MiB", 9 * GIB: "9.00 GiB"}
    assert [format_bytes(size) for size in sizes] == list(sizes.values())
