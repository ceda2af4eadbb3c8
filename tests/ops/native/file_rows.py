"""Random rows of every weight format as files keep them, and what they mean in float32, stated apart from our code."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from kvarto.core.weight_format import WeightFormat, block_columns, row_bytes

Array = np.ndarray[Any, Any]

QUANTS = tuple(format for format in WeightFormat if not format.is_float and format is not WeightFormat.INT4)
_HALVES: dict[WeightFormat, tuple[int, ...]] = {
    WeightFormat.Q4_1: (0, 2), WeightFormat.Q5_1: (0, 2), WeightFormat.Q4_K: (0, 2), WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
}  # fmt: skip
"""Where the float16 numbers of a block lie, where that is not at 0 alone."""


def random_rows(
    format: WeightFormat, num_rows: int, num_columns: int, rng: np.random.Generator, group_size: int = 0
) -> Array:
    """`[num_rows, bytes of a row]`: every bit random, but for scales, which are finite."""
    if format.is_float:
        values = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[format.value.upper()]
        return np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8).reshape(num_rows, -1)
    raw = rng.integers(0, 256, (num_rows, row_bytes(format, num_columns, group_size)), dtype=np.uint8)
    blocks = raw.reshape(num_rows, num_columns // block_columns(format, group_size), -1)
    for at in _HALVES.get(format, (0,)):
        halves = (0.1 * rng.standard_normal((*blocks.shape[:2], 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    if format is WeightFormat.INT4:
        blocks[:, :, 2] &= 15  # zero points of 4 bits
    return raw


def meaning(format: WeightFormat, raw: Array, group_size: int = 0) -> Array:
    """`[num_rows, num_columns]` float32: as the `gguf` package dequantises; for int4, by its layout."""
    if format is not WeightFormat.INT4:
        values: Array = gguf.dequantize(raw, gguf.GGMLQuantizationType[format.value.upper()])
        return values
    groups = raw.reshape(len(raw), -1, 3 + group_size // 2)
    scales = np.ascontiguousarray(groups[:, :, :2]).view(np.float16).astype(np.float32)
    zeros = groups[:, :, 2:3].astype(np.int32)
    bytes_of_32 = groups[:, :, 3:].reshape(*groups.shape[:2], group_size // 32, 16)
    codes = np.concatenate([bytes_of_32 & 15, bytes_of_32 >> 4], axis=-1).astype(np.int32)
    by_group: Array = (codes.reshape(*groups.shape[:2], group_size) - zeros).astype(np.float32)
    return (by_group * scales).reshape(len(raw), -1)
