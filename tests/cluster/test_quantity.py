"""Kubernetes quantities, against decimal arithmetic and the grammar's own examples."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.cluster.quantity import format_quantity, means_bytes, parse_quantity, suffix_of, whole_number

BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
DECIMAL = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "": "1", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"}


@given(st.decimals(0, 10**12, places=4), st.sampled_from([*BINARY, *DECIMAL]))
def test_a_number_times_its_suffix(number: Decimal, suffix: str) -> None:
    unit = Fraction(BINARY[suffix]) if suffix in BINARY else Fraction(Decimal(DECIMAL[suffix]))
    assert parse_quantity(f"{number}{suffix}") == Fraction(number) * unit
    assert parse_quantity(f"-{number}{suffix}") == -Fraction(number) * unit


@given(st.integers(0, 1 << 70))
def test_formatting_keeps_every_byte(size_bytes: int) -> None:
    assert parse_quantity(format_quantity(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000), ("1E3", 1000), ("1E", 10**18), (".5Gi", 2**29), ("5.", 5), ("12e-1", Fraction(6, 5))],
)
def test_forms_of_the_grammar(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "Gi", "1 Gi", "16GiB", "16GB", "1,5", "0x10", "1e", "16gi", "1K", "--1", "1.2.3", "ten",
        "1e999", "9" * 65, "9" * 5000, "1" * 40 + "Gi",
    ],
)  # fmt: skip
def test_what_the_api_server_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
    assert whole_number(text) is None


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "16GiB", "1e", "ten"])
def test_what_is_no_quantity_has_no_suffix(text: str) -> None:
    assert suffix_of(text) == ""


def test_bytes_are_told_from_counts() -> None:
    assert [means_bytes(text) for text in ("16Gi", "16G", "1M", "3k", "500m", "16384", 16384, "1e9")] == [
        True, True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert [format_quantity(value) for value in (0, 1000, 2**30, 2**30 + 2**20)] == ["0", "1000", "1Gi", "1025Mi"]
