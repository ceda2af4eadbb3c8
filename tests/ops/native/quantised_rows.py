"""Rows of int8 activations as native/core/rows.h draws them: what quantising must give, and what bytes mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GROUP = 32
"""Elements of a row that share a scale."""
FINE_STEPS = 128
"""Of a fine code, to one of a code."""
FINE_BELOW = 14 * GROUP
"""A group whose codes' magnitudes add up to less has fine codes."""


@dataclass(frozen=True)
class QuantisedRows:
    """Codes `[rows, groups, 32]`, fine ones 0 where a group has none; the others `[rows, groups]`."""

    codes: Array
    fine_codes: Array
    scales: Array
    sums: Array
    is_fine: Array

    @property
    def values(self) -> Array:
        """`[rows, width]` float64: what they mean."""
        steps = self.codes + self.fine_codes / np.float64(FINE_STEPS)
        values: Array = (steps * self.scales[..., None].astype(np.float64)).reshape(len(steps), -1)
        return values


def quantise(x: Array) -> QuantisedRows:
    """The law, of float32 `[rows, width]` whose groups are 0 or have a largest value of 1e-26 or more."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(largest[..., None] > 0, groups * (np.float32(127) / largest)[..., None], np.float32(0))
    codes = np.rint(steps)
    is_fine = (np.abs(codes).sum(axis=2) < FINE_BELOW) & (largest > 0)
    fine_codes = np.where(is_fine[..., None], np.rint((steps - codes) * FINE_STEPS), 0)
    scales = largest / np.float32(127)
    total = (codes * FINE_STEPS + fine_codes).sum(axis=2).astype(np.float64) / FINE_STEPS
    return QuantisedRows(codes, fine_codes, scales, (scales * total).astype(np.float32), is_fine)


def parse(raw: Array, width: int) -> QuantisedRows:
    """Of bytes `[rows, row bytes]`."""
    num_groups, start = width // GROUP, -(-2 * width // 64) * 64

    def numbers(first: int, count: int, kind: type) -> Array:
        size = np.dtype(kind).itemsize
        return np.ascontiguousarray(raw[:, first : first + count * size]).view(kind).reshape(len(raw), num_groups, -1)

    codes, fine_codes = (numbers(first, width, np.int8).astype(np.float32) for first in (0, width))
    scales, sums = (numbers(start + 4 * num_groups * i, num_groups, np.float32)[..., 0] for i in range(2))
    is_fine = numbers(start + 16 * num_groups, num_groups, np.uint8)[..., 0] != 0
    return QuantisedRows(codes, np.where(is_fine[..., None], fine_codes, 0), scales, sums, is_fine)
