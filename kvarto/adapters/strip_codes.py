"""Strips of codes, in NumPy: what values become, and what codes stand for. Sizes and layout: core/strip_type.py.

    int8   scale = largest magnitude / 127; codes -127..127
    int4   codes -8..7; scale = m / d, where m is the value with the largest magnitude (the first of several) and d that
           of `DIVISORS` with the least sum of squared errors (the first of several)
    code   value / scale, to nearest even, into its range; every step in float32, the scale as float16 has it

A scale that float16 rounds down by so much that the largest value would be half a code out of range is the next larger
one; so a value becomes zero for want of a small scale only below half of the smallest float16, 3e-8. The scale of a
block of zeros is 0. Native code does the same in one pass over the file (native/ops/strip_codes.cpp); this is what
it is compared with, and what reads codes where DoRA needs values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.core.strip_type import BLOCK_COLUMNS, SCALE_BYTES, StripType
from kvarto.models.convert import to_bfloat16

DIVISORS = (-8.0, -7.5, -7.0, -8.5)
"""The first uses all codes; the others trade the largest value for those between. Of normal numbers the error is 8.2 %,
where the first alone has 8.6 %, and a fine search 8.1 %."""

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise(values: Float32, type: StripType) -> Bytes | None:
    """Blocks of `[..., columns]`, as bytes in the order of the values; None where a scale is beyond float16.

    Values are finite, and columns whole blocks.
    """
    blocks = values.reshape(-1, BLOCK_COLUMNS)
    scales, codes = _quantise_q8(blocks) if type is StripType.Q8 else _quantise_q4(blocks)
    if not np.isfinite(scales).all():
        return None
    packed: Bytes = codes.astype(np.int8).view(np.uint8)
    if type is StripType.Q4:
        biased = packed + np.uint8(8)
        packed = (biased[:, :16] & np.uint8(15)) | biased[:, 16:] << np.uint8(4)
    return np.concatenate((scales.view(np.uint8), packed), axis=1).reshape(-1)


def dequantise(blocks: Bytes, type: StripType) -> Float32:
    """What codes stand for, flat, each a bfloat16."""
    rows = blocks.reshape(-1, type.block_bytes)
    scales = rows[:, :SCALE_BYTES].copy().view("<f2").astype(np.float32)
    codes = rows[:, SCALE_BYTES:]
    if type is StripType.Q4:
        codes = np.concatenate((codes & 15, codes >> 4), axis=1) - np.uint8(8)
    rounded = to_bfloat16(codes.view(np.int8).astype(np.float32) * scales)
    return (rounded.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(-1)


def _quantise_q8(blocks: Float32) -> tuple[NDArray[Any], Float32]:
    """Scales `[blocks, 1]` in float16, codes as float32."""
    scales = _scales(np.abs(blocks).max(axis=1, keepdims=True), 127.0)
    return scales, _codes(blocks, scales, -127, 127)


def _quantise_q4(blocks: Float32) -> tuple[NDArray[Any], Float32]:
    places = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, places, axis=1)
    best_scales = _scales(largest, DIVISORS[0])
    best_codes, least = _with_error(blocks, best_scales)
    for divisor in DIVISORS[1:]:
        scales = _scales(largest, divisor)
        codes, error = _with_error(blocks, scales)
        is_better = (error < least) & np.isfinite(scales)
        best_scales, best_codes, least = (
            np.where(is_better, new, old) for new, old in ((scales, best_scales), (codes, best_codes), (error, least))
        )
    return best_scales, best_codes


def _scales(largest: Float32, divisor: float) -> NDArray[Any]:
    """`largest / divisor` in float16, or the next larger one where that is too small by half a code; of 0 it is 0."""
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(divisor) + np.float32(0)).astype("<f2")
    is_small = np.abs(largest) > np.float32(abs(divisor) + 0.5) * np.abs(scales.astype(np.float32))
    return (scales.view(np.uint16) + is_small).astype("<u2").view("<f2")


def _codes(blocks: Float32, scales: NDArray[Any], least: int, most: int) -> Float32:
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.where(scales == 0, np.float32(0), blocks / scales.astype(np.float32))
    codes: Float32 = np.rint(np.clip(quotients, least, most)).astype(np.float32)
    return codes


def _with_error(blocks: Float32, scales: NDArray[Any]) -> tuple[Float32, Float32]:
    """Codes, and the sum of squares `[blocks, 1]`: halves, quarters, and so on, added up in this order."""
    codes = _codes(blocks, scales, -8, 7)
    with np.errstate(invalid="ignore"):
        squares = np.square(blocks - codes * scales.astype(np.float32))
    while (half := squares.shape[1] // 2) > 0:
        squares = squares[:, :half] + squares[:, half:]
    return codes, squares
