"""Kubernetes quantities, exactly: `16Gi`, `16G`, `500m`, `1e3`. Source: apimachinery's `resource.Quantity` grammar."""

from __future__ import annotations

import re
from fractions import Fraction

from kvarto.core.units import GIB, KIB, MIB

_BINARY = {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15),
    "E": Fraction(10**18),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i)|([numkMGTPE]?)|[eE]([+-]?[0-9]{1,3}))")
_BYTE_SUFFIXES = frozenset({*_BINARY, "M", "G", "T", "P", "E"})
_MAX_LETTERS = 64
_MAX_VALUE = 1 << 100
"""Far beyond what Kubernetes stores (2^63), and such that whatever is worked out from it can still be printed."""


def parse_quantity(value: str | int | float) -> Fraction:
    """The exact number. Raises ValueError for what the API server would refuse."""
    text = str(value)
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LETTERS else None
    if match is None:
        raise ValueError(f"`{text:.80}` is not a quantity; write a number such as `16384`, `16Gi` or `500m`")
    sign, digits, binary, decimal, exponent = match.groups()
    unit = _BINARY[binary] if binary else Fraction(10) ** int(exponent) if exponent else _DECIMAL[decimal or ""]
    number = Fraction(digits) * unit
    if number > _MAX_VALUE:
        raise ValueError(f"`{text}` is not a quantity that anybody counts; Kubernetes ends at 2^63 - 1")
    return -number if sign == "-" else number


def whole_number(value: object) -> int | None:
    """What is written in digits alone; None for anything else, and for more digits than a count can have."""
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def suffix_of(value: str | int | float) -> str:
    """`Gi`, `k`, … ; empty for plain numbers, exponents and what is no quantity."""
    match = _QUANTITY.fullmatch(str(value))
    return (match[3] or match[4] or "") if match else ""


def means_bytes(value: str | int | float) -> bool:
    """Whether whoever wrote it thought of bytes: `16Gi`, `16G`, and not `3k` or `16384`."""
    return suffix_of(value) in _BYTE_SUFFIXES


def means_mebibytes(value: str | int | float) -> bool:
    """Whether it looks like `16384m`, as HAMi's own environment writes sizes; to Kubernetes that is 16.384."""
    return suffix_of(value) == "m"


def format_quantity(size_bytes: int) -> str:
    """The shortest binary quantity that is exactly `size_bytes`: `16Gi`, `16385Mi`, `1000`."""
    for suffix, unit in sorted(_BINARY.items(), key=lambda item: -item[1]):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)
