"""Sizes and counts as people type them, and as we print them. Bytes are exact integers everywhere."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "B": 1,
    "K": KIB, "KIB": KIB, "KB": 10**3,
    "M": MIB, "MIB": MIB, "MB": 10**6,
    "G": GIB, "GIB": GIB, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def _scale(whole: str, fraction: str | None, unit: int) -> int:
    """`whole.fraction * unit`, rounded down, in exact integers."""
    digits = fraction or ""
    denominator: int = 10 ** len(digits)
    return int(whole + digits) * unit // denominator


def parse_bytes(text: str | int) -> int:
    """`8GiB`, `8G` (binary), `8GB` (decimal), `512MiB` or plain bytes, as an exact integer. Raises ValueError."""
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]*)\s*", text)
        unit = _UNITS.get(match[3].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"`{text}` is not a size; write bytes or a size such as `512MiB`, `8GiB` or `8GB`")
        value = _scale(match[1], match[2], unit)
    if value < 0:
        raise ValueError(f"`{text}` is negative; a size is 0 or more")
    return value


def parse_count(text: str | int) -> int:
    """`4096`, `4k` (4,000), `4K` (4,096), `25.6k`. Raises ValueError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([kKmMgG]?)\s*", text)
    if match is None:
        raise ValueError(f"`{text}` is not a count; write a number such as `4096`, `4k` (4,000) or `4K` (4,096)")
    unit = _COUNTS[match[3]]
    if match[2] and int(match[1] + match[2]) * unit % 10 ** len(match[2]):
        raise ValueError(f"`{text}` is not a whole count; write a number such as `4096` or `25.6k`")
    return _scale(match[1], match[2], unit)


def format_bytes(size_bytes: int) -> str:
    """`1.50 GiB`; whole bytes below 1 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)
